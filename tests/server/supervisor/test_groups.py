"""An engine of two ranks: it answers as one does, and ends as a whole, with the reason, whatever befalls one rank."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import orjson
import pytest
from broken_ranks import site
from llmcore_devtools import sockets
from llmcore_devtools.fake_files import write_fake_model
from llmcore_devtools.server import ENGINE_MODULE, RunningServer, ServerFailed, serving
from llmcore_server.supervisor import Grouping, Patience
from llmcore_server.supervisor.group import RANK_MODULE

PATIENCE = Patience(beat=0.05, stopped=0.2, silent=1.0, launching=1.0, joining=30.0)


@dataclass
class Group:
    """A server whose engine has two ranks, and the directory of orders for its second one."""

    server: RunningServer
    orders: Path

    def pids(self) -> dict[str, int]:
        return {name: pid for name, pid in self.server.children().items() if name in (ENGINE_MODULE, RANK_MODULE)}

    def answer(self, ids: str = "hello", n: int = 20, **more: object) -> str:
        body = {"inputs": ids, "parameters": {"max_new_tokens": n, "ignore_eos": True, **more}}
        status, _, answer = sockets.call(self.server.port, "POST", "/generate", body)
        return str(orjson.loads(answer)["generated_text"][0]) if status == 200 else f"status {status}: {answer!r}"


def until(condition: Callable[[], object], seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "did not happen"
        time.sleep(0.02)


def readiness(server: RunningServer) -> int:
    return sockets.call(server.port, "GET", "/readiness")[0]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_fake_model(tmp_path_factory.mktemp("models") / "fake", step_delay=0.002)


@pytest.fixture(scope="module")
def orders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder, orders = tmp_path_factory.mktemp("site"), tmp_path_factory.mktemp("orders")
    site(folder, orders)
    paths = [str(folder), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(path for path in paths if path))
        yield orders


@pytest.fixture(scope="module")
def group(model: Path, orders: Path) -> Iterator[Group]:
    settings = {"max_total_token_num": 4000, "health_monitor": True, "restart_pause": 0.05, "restart_limit": 0}
    with serving(model, grouping=Grouping(patience=PATIENCE), tp=2, **settings) as server:
        yield Group(server, orders)


def kill(group: Group) -> None:
    os.kill(group.pids()[RANK_MODULE], signal.SIGKILL)


def stop(group: Group) -> None:
    os.kill(group.pids()[RANK_MODULE], signal.SIGSTOP)


def order(name: str) -> Callable[[Group], None]:
    def give(group: Group) -> None:
        (group.orders / name).touch()

    return give


@pytest.mark.parametrize(
    ("break_it", "said"),
    [
        pytest.param(
            kill, r"rank 1 of engine-0 \(pid \d+, cpu:1\): it .*; rank 0 .*; it was ended by SIGKILL", id="kill"
        ),
        pytest.param(stop, r"rank 1 of engine-0 .* was stopped by a signal 0.2 s ago; rank 0 ", id="stop"),
        pytest.param(order("packs"), r"rank 1 failed in step \d+: .*packs the step differently", id="packs"),
        pytest.param(order("slow"), r"rank 1 of engine-0 .* not launched a step within 1 s .* in step \d+", id="slow"),
    ],
)
def test_a_broken_rank_ends_its_group(group: Group, break_it: Callable[[Group], None], said: str) -> None:
    server, before = group.server, group.pids()
    assert len(group.answer()) == 20
    known = len(server.log.read_text())
    answers: list[str] = []
    # the fake model has whole logits on each rank: with a filter rank 0 waits for nobody and gets ahead of a slow rank
    asking = threading.Thread(target=lambda: answers.append(group.answer(n=3900, do_sample=True, top_k=5)))
    asking.start()
    time.sleep(0.2)
    break_it(group)
    until(lambda: readiness(server) == 503)
    until(lambda: not set(before.values()) & {pid for pid in before.values() if Path(f"/proc/{pid}").exists()}, 5.0)
    for name in group.orders.iterdir():
        name.unlink()
    asking.join(30)
    assert re.match(r"status 50[03]", answers[0]), "the client gets an error"
    until(lambda: readiness(server) == 200)
    assert re.search(said, server.log.read_text()[known:]), server.log.read_text()[known:]
    assert not set(group.pids().values()) & set(before.values())
    assert len(group.answer()) == 20


def test_a_rank_that_never_joins_is_named_and_nothing_is_left(model: Path, orders: Path) -> None:
    (orders / "absent").touch()
    patience = Patience(joining=8.0)
    with (
        pytest.raises(ServerFailed) as failed,
        serving(model, max_total_token_num=4000, grouping=Grouping(patience=patience), tp=2),
    ):
        pass
    (orders / "absent").unlink()
    assert re.search(
        r"StartupError: rank 1 of engine-0 \(pid \d+\) has not joined within 8 s; rank 0 .*; start the server again",
        str(failed.value),
    )
    assert not ranks_left()


def test_without_a_monitor_the_server_ends_too_and_nothing_is_left(model: Path, orders: Path) -> None:
    with serving(model, max_total_token_num=4000, grouping=Grouping(patience=PATIENCE), tp=2) as server:
        group, directory, children = Group(server, orders), run_directory(server), server.children()
        assert (directory / "engine-0.1").is_socket()
        assert len(group.answer()) == 20
        (orders / "raises").touch()
        assert re.match(r"status 50[03]", group.answer())
        assert server.process.wait(30) == 1
        (orders / "raises").unlink()
        said = r"rank 1 of engine-0 .*; it failed: rank 1 failed in step \d+: RuntimeError: told .*; the server ends"
        assert re.search(said, server.log.read_text())
        assert not any(Path(f"/proc/{pid}").exists() for pid in children.values())
        assert not directory.exists() and not ranks_left()


def run_directory(server: RunningServer) -> Path:
    """The directory with the sockets of a server that runs: it holds a lock on it."""
    links = [os.readlink(path) for path in Path(f"/proc/{server.process.pid}/fd").iterdir() if path.is_symlink()]
    return next(Path(link) for link in links if re.fullmatch(r"/tmp/llmcore-\w+", link))


def ranks_left() -> list[str]:
    """Command lines of ranks with no parent."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            text, parent = path.read_bytes().decode(), (path.parent / "stat").read_text().rpartition(")")[2].split()[1]
        except OSError:
            continue  # it has just ended
        if RANK_MODULE in text and parent == "1":
            found.append(text)
    return found
