"""A process of a server that loses one of its threads ends at once, says why, and is replaced."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from llmcore_devtools.server import FAKE_ENGINE, RunningServer, serving
from llmcore_devtools.tokenizer import write_tokenizer

WORKER, ADMIN = "llmcore_server.http.worker", "llmcore_server.http.admin.process"

BREAKS = """
import os, sys
from pathlib import Path

ERRORS = {{"bug": RuntimeError("a bug"), "exit": SystemExit(0), "memory": MemoryError("a bug")}}
told = Path({orders!r}, str(os.getpid()))

def breakable(owner, method, thread):
    kept = getattr(owner, method)
    def broken(self, *args, **named):
        if told.exists() and told.read_text().split()[0] == thread:
            raise ERRORS[told.read_text().split()[1]]
        return kept(self, *args, **named)
    setattr(owner, method, broken)

if {worker!r} in sys.orig_argv or {admin!r} in sys.orig_argv:
    from llmcore_server.http.streaming import HttpServer
    breakable(HttpServer, "_turn", "loop")
if {worker!r} in sys.orig_argv:
    from llmcore_server.messages import Tally
    breakable(Tally, "news", "hub")
if {admin!r} in sys.orig_argv:
    from llmcore_server.http.admin.board import Board
    breakable(Board, "tick", "hub")
"""
"""What a Python that finds this as its sitecustomize does: a thread of a process raises once its order is there."""


@dataclass
class Breakable:
    """A server, and the directory in which its processes find their orders."""

    server: RunningServer
    orders: Path

    def processes(self, module: str) -> list[int]:
        """Their ids."""
        return [pid for name, pid in self.server.children().items() if name.partition("#")[0] == module]

    def oldest(self, module: str) -> int:
        """Whoever dies young is replaced only after a pause."""
        return min(self.processes(module), key=lambda pid: os.stat(f"/proc/{pid}").st_mtime_ns)

    def break_thread(self, pid: int, thread: str, error: str) -> None:
        """Let one of its threads raise."""
        order = self.orders / str(pid)
        order.with_suffix(".new").write_text(f"{thread} {error}")
        order.with_suffix(".new").rename(order)


@pytest.fixture(scope="module")
def breakable(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Breakable]:
    site, orders = tmp_path_factory.mktemp("site"), tmp_path_factory.mktemp("orders")
    (site / "sitecustomize.py").write_text(BREAKS.format(orders=str(orders), worker=WORKER, admin=ADMIN))
    paths = [str(site), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    model = write_tokenizer(tmp_path_factory.mktemp("model"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(path for path in paths if path))
        with serving(model, engine_module=FAKE_ENGINE, watchdog_timeout=60, httpserver_workers=3) as server:
            yield Breakable(server, orders)


def until(condition: Callable[[], object], seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "did not happen"
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("module", "thread", "error", "said"),
    [
        (WORKER, "hub", "bug", "the hub of this worker failed"),
        (ADMIN, "hub", "bug", "the hub of the admin listener failed"),
        (WORKER, "hub", "exit", "the hub of this worker failed"),
        (WORKER, "loop", "memory", "MemoryError: a bug"),
        (WORKER, "loop", "exit", "SystemExit: 0"),
        (ADMIN, "loop", "exit", "SystemExit: 0"),
    ],
)
def test_who_loses_a_thread_is_replaced(breakable: Breakable, module: str, thread: str, error: str, said: str) -> None:
    server, before = breakable.server, breakable.processes(module)
    known = len(server.log.read_text())
    victim = breakable.oldest(module)
    breakable.break_thread(victim, thread, error)
    until(lambda: victim not in breakable.processes(module))
    until(lambda: len(breakable.processes(module)) == len(before))
    name = "worker" if module == WORKER else "admin"
    words = re.compile(rf"{name}-\d (ended with exit code 1|failed: {re.escape(said)}).*; starting another")
    until(lambda: words.search(server.log.read_text()[known:]))
    assert said in server.log.read_text()[known:]
