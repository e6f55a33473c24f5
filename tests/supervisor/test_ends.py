"""A process of a server that loses one of its threads ends at once, says why, and is replaced."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from llmcore.testing.server import FAKE_ENGINE, RunningServer, serving
from llmcore.testing.tokenizer import write_tokenizer

WORKER, ADMIN = "llmcore.http.worker", "llmcore.http.admin.process"

BREAK = """
import os, sys, time
from pathlib import Path

told = Path({flag!r}).exists

def broken():
    if told() and str(os.getpid()) == Path({flag!r}).read_text():
        raise {error}

if {module!r} in sys.orig_argv:
    from {where} import {owner}
    kept = {owner}.{method}
    def method(self, *args, **named):
        {before}
        return kept(self, *args, **named)
    {owner}.{method} = method
"""
"""What a Python that finds this as its sitecustomize does: in processes of `module`, `method` raises when told to."""

HUB = ("llmcore.http.bridge", "WireBridge", "_tally", "broken()")
BOARD = ("llmcore.http.admin.board", "Board", "tick", "broken()")
LOOP = ("llmcore.http.streaming", "HttpServer", "run", "while not told(): time.sleep(0.01)\n        broken()")


def until(condition: Callable[[], object], seconds: float = 8.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "did not happen"
        time.sleep(0.02)


def processes(server: RunningServer) -> dict[str, int]:
    return {name: pid for name, pid in server.children().items() if name in (WORKER, ADMIN)}


@pytest.mark.parametrize(
    ("module", "what", "error", "said"),
    [
        (WORKER, HUB, "RuntimeError('a bug')", "the hub of this worker failed"),
        (WORKER, HUB, "SystemExit(0)", "the hub of this worker failed"),
        (WORKER, LOOP, "MemoryError('a bug')", "MemoryError: a bug"),
        (WORKER, LOOP, "SystemExit(0)", "SystemExit: 0"),
        (ADMIN, BOARD, "RuntimeError('a bug')", "the hub of the admin listener failed"),
        (ADMIN, LOOP, "SystemExit(0)", "SystemExit: 0"),
    ],
)
def test_who_loses_a_thread_is_replaced(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    module: str,
    what: tuple[str, str, str, str],
    error: str,
    said: str,
) -> None:
    where, owner, method, before = what
    flag = tmp_path / "flag"
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(
        BREAK.format(
            **{"flag": str(flag), "error": error, "module": module},
            **{"where": where, "owner": owner, "method": method, "before": before},
        )
    )
    paths = [str(tmp_path / "site"), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in paths if path))
    with serving(write_tokenizer(tmp_path / "model"), engine_module=FAKE_ENGINE, watchdog_timeout=60) as server:
        old = processes(server)
        (tmp_path / "now").write_text(str(old[module]))
        (tmp_path / "now").rename(flag)
        until(lambda: processes(server).get(module) not in (None, old[module]))
        log = server.log.read_text()
        name = "worker-0" if module == WORKER else "admin-0"
        assert re.search(rf"{name} (ended with exit code 1|failed: {re.escape(said)}).*; starting another", log), log
        assert said in log
