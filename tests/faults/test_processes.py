"""Processes that die, hang, are told to stop or are lied to. Rows 59 to 62."""

from __future__ import annotations

import json
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest
import zmq
from conftest import MakeHouse
from harness import PATIENCE, House, until
from llmcore_devtools import sockets
from llmcore_devtools.server import ENGINE_MODULE

WORKER = "llmcore_server.http.worker"
PROMPT = [5, 6, 7]
REVIVED = {"health_monitor": True, "restart_pause": 0.1, "restart_limit": 0}
ROOM = {"max_total_token_num": 60_000}
"""KV for a dozen whole answers: whether fewer places are enough depends on how far those before have come."""


AT_ONCE = 20.0
"""Seconds: far less than whoever waits for a drain, a watchdog or a stream to its end would take."""


def ended(pid: int) -> bool:
    """Whether a process has ended, reaped or not."""
    try:
        return "\nState:\tZ" in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return True


def run_directory(house: House) -> Path:
    """Where a running server keeps its sockets."""
    files = (Path(os.readlink(file)) for file in Path(f"/proc/{house.server.process.pid}/fd").iterdir())
    (directory,) = (file.parent for file in files if file.name == "lock")
    return directory


@contextmanager
def streams(house: House, count: int, n_tokens: int = 4000) -> Iterator[list[socket.socket]]:
    """Streams that have begun."""
    body = {"prompt": PROMPT, "max_tokens": n_tokens, "temperature": 0, "stream": True}
    with ExitStack() as stack:
        socks = [stack.enter_context(sockets.connect(house.port)) for _ in range(count)]
        for sock in socks:
            sock.sendall(house.request("/v1/completions", body))
        for sock in socks:
            assert sockets.read_head(sock)[0] == 200
        yield socks


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """A process that does nothing meanwhile: whoever connects gets another worker."""
    os.kill(pid, signal.SIGSTOP)
    try:
        until(lambda: "\nState:\tT" in Path(f"/proc/{pid}/status").read_text(), "it stands still")
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def rest(sock: socket.socket) -> bytes:
    """What still comes, until the server closes or cuts the connection."""
    data = b""
    try:
        while more := sock.recv(1 << 16):
            data += more
    except ConnectionResetError:
        pass
    return data


def ended_by_error(data: bytes) -> bool:
    """Whether a stream ended in order, with an error event and without [DONE]."""
    return b'"error"' in data and b"[DONE]" not in data and data.endswith(b"0\r\n\r\n")


def is_ready(house: House) -> bool:
    return house.is_ready()


# --- 59: kill -9 -----------------------------------------------------------------------------------------------------


def test_a_killed_worker_takes_only_its_own_requests_along(make_house: MakeHouse) -> None:  # row 59
    with make_house(settled=False, httpserver_workers=2, **ROOM) as house, ExitStack() as stack:
        before = house.server.children()
        with stopped(before[WORKER + "#2"]):
            mine = stack.enter_context(streams(house, 6))
        with stopped(before[WORKER]):  # should that take so long that the engine ends what it has, no matter
            others = stack.enter_context(streams(house, 6))
        os.kill(before[WORKER], signal.SIGKILL)
        killed = time.monotonic()
        until(lambda: before[WORKER] not in house.server.children().values(), "it is noticed")
        for sock in mine:
            rest(sock)
        assert time.monotonic() - killed < AT_ONCE
        for sock in others:
            sock.settimeout(0.0)
            with suppress(BlockingIOError):
                while sock.recv(1 << 20):
                    pass
            sock.settimeout(PATIENCE)
            assert sock.recv(1 << 20), "it goes on"
            sock.close()
        until(lambda: len(house.server.children()) == len(before), "another worker")
        assert house.server.children()[ENGINE_MODULE] == before[ENGINE_MODULE]
        said = re.compile(r"worker-\d was ended by SIGKILL \(.*\); starting another")
        until(lambda: said.search(house.server.log.read_text()), "it is told of")
        house.check(processes=False)


def test_a_killed_engine_ends_streams_with_an_error_and_is_replaced(make_house: MakeHouse) -> None:  # row 59
    with make_house(httpserver_workers=2, **ROOM, **REVIVED) as house:
        children = house.server.children()
        with streams(house, 6) as socks, sockets.connect(house.port) as whole:
            whole.sendall(house.request("/v1/completions", {"prompt": PROMPT, "max_tokens": 4000}))
            until(lambda: house.figures()["batch_current_size"] == 7, "all of them run")
            os.kill(children[ENGINE_MODULE], signal.SIGKILL)
            killed = time.monotonic()
            assert all(ended_by_error(rest(sock)) for sock in socks)
            assert sockets.read_reply(whole)[0] == 503
            assert time.monotonic() - killed < AT_ONCE
        with suppress(ConnectionError):  # of a worker that is replaced with its engine
            status, headers, body = house.post("/v1/completions", {"prompt": PROMPT, "max_tokens": 2})
            assert status in (200, 503), body  # a new engine may be there already
            assert status == 200 or int(headers["retry-after"]) >= 1
        until(lambda: house.server.children().get(ENGINE_MODULE) not in (None, children[ENGINE_MODULE]), "another")
        house.first = b""  # the next canonical request meets an empty prefix cache
        house.check(processes=False)


def test_a_killed_engine_ends_an_unsupervised_server_with_code_1(make_house: MakeHouse) -> None:  # row 59
    with make_house(settled=False) as house:
        children, directory = house.server.children(), run_directory(house)
        os.kill(children[ENGINE_MODULE], signal.SIGKILL)
        assert house.server.process.wait(PATIENCE) == 1
        assert all(ended(pid) for pid in children.values())
        assert not directory.exists()


# --- 60: SIGSTOP -----------------------------------------------------------------------------------------------------


def test_a_stopped_engine_is_killed_with_its_stacks_in_a_file(make_house: MakeHouse) -> None:  # row 60
    with make_house(settled=False, watchdog_timeout=3, **REVIVED) as house:
        children = house.server.children()
        with streams(house, 2) as socks:
            os.kill(children[ENGINE_MODULE], signal.SIGSTOP)
            assert all(ended_by_error(rest(sock)) for sock in socks)
        until(lambda: is_ready(house), "ready again")
        log = house.server.log.read_text()
        stacks = Path(re.search(r"finished no step for 3 s and is killed; its stacks are in (\S+)", log)[1])  # type: ignore[index]
        assert "engine/process.py" in stacks.read_text()
        assert stacks.stat().st_mode & 0o077 == 0
        house.first = b""
        house.check(processes=False)


def test_beside_a_stopped_worker_the_other_serves_everybody(make_house: MakeHouse) -> None:  # row 60
    with make_house(settled=False, httpserver_workers=2, watchdog_timeout=3) as house:
        victim = house.server.children()[WORKER]
        os.kill(victim, signal.SIGSTOP)
        while victim in house.server.children().values():  # also when it goes on for a moment, to write its stacks
            assert house.post("/v1/completions", {"prompt": PROMPT, "max_tokens": 2})[0] == 200
        until(lambda: WORKER + "#2" in house.server.children(), "another worker")
        said = re.compile(r"worker-\d was silent for 3 s and is killed; its stacks are in")
        until(lambda: said.search(house.server.log.read_text()), "it is told of")
        house.check(processes=False)


# --- 61: SIGTERM and SIGKILL -----------------------------------------------------------------------------------------


def test_sigterm_ends_an_idle_server_at_once(make_house: MakeHouse) -> None:  # row 61
    with make_house(settled=False, drain_timeout=120) as house, sockets.connect(house.port) as kept:
        kept.sendall(sockets.request("GET", "/health"))
        assert sockets.read_reply(kept)[0] == 200
        start = time.monotonic()
        assert house.server.stop() == 0
        assert time.monotonic() - start < AT_ONCE
        assert kept.recv(1) == b""


def refused_for_good(house: House) -> bool:
    status, headers, _ = house.post("/v1/completions", {"prompt": PROMPT, "max_tokens": 2})
    return status == 503 and headers.get("connection") == "close" and int(headers["retry-after"]) >= 1


def test_sigterm_lets_a_hundred_streams_finish_and_refuses_others(make_house: MakeHouse) -> None:  # row 61
    with make_house(settled=False, drain_timeout=120, running_max_req_size=128, httpserver_workers=2) as house:
        children = house.server.children()
        with streams(house, 100, 150) as socks:
            with streams(house, 1):  # nothing ends before all has been looked at
                house.server.process.send_signal(signal.SIGTERM)
                until(lambda: not is_ready(house), "/readiness says 503")
                # workers hear that nothing is ready before they hear of the end, and one after the other
                until(lambda: refused_for_good(house), "refused, and the connection closed")
            data = [rest(sock) for sock in socks]
        assert all(b"[DONE]" in answer and b'"error"' not in answer for answer in data)
        assert house.server.process.wait(PATIENCE) == 0
        assert all(ended(pid) for pid in children.values())


def test_streams_that_outlast_the_drain_end_with_an_error(make_house: MakeHouse) -> None:  # row 61
    with make_house(settled=False, drain_timeout=0.5) as house, streams(house, 3) as socks:
        start = time.monotonic()
        house.server.process.send_signal(signal.SIGTERM)
        assert all(ended_by_error(rest(sock)) for sock in socks)
        assert house.server.process.wait(PATIENCE) == 0
        assert 0.5 <= time.monotonic() - start < 0.5 + AT_ONCE


def test_a_second_sigterm_ends_a_drain_now(make_house: MakeHouse) -> None:  # row 61
    with make_house(settled=False, drain_timeout=120) as house:
        children = house.server.children()
        with streams(house, 3):
            house.server.process.send_signal(signal.SIGTERM)
            until(lambda: not is_ready(house), "draining")
            start = time.monotonic()
            assert house.server.stop() == 0
            assert time.monotonic() - start < AT_ONCE
        assert all(ended(pid) for pid in children.values())


def test_an_engine_that_dies_during_a_drain_ends_it(make_house: MakeHouse) -> None:  # row 61
    with make_house(settled=False, drain_timeout=120) as house, streams(house, 3) as socks:
        house.server.process.send_signal(signal.SIGTERM)
        until(lambda: not is_ready(house), "draining")
        os.kill(house.server.children()[ENGINE_MODULE], signal.SIGKILL)
        assert all(ended_by_error(rest(sock)) for sock in socks)
        assert house.server.process.wait(PATIENCE) == 1


def test_what_a_killed_supervisor_leaves_is_gone_with_the_next_server(make_house: MakeHouse) -> None:  # row 61
    shared = set(os.listdir("/dev/shm"))
    with make_house(httpserver_workers=2) as house, streams(house, 3):
        children, directory = house.server.children(), run_directory(house)
        house.server.process.kill()
        house.server.process.wait()
        until(lambda: all(ended(pid) for pid in children.values()), "children are gone")
    with make_house() as house:
        assert not directory.exists()
        house.check()
    assert set(os.listdir("/dev/shm")) <= shared


# --- 62: strangers on the inner sockets ------------------------------------------------------------------------------


class Bomb:
    """Creates a file where it is unpickled."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[object, tuple[str, int]]:
        return os.mkdir, (str(self.canary), 0o700)


def test_strangers_on_inner_sockets_are_dropped_and_counted(house: House, tmp_path: Path) -> None:  # row 62
    directory, canary = run_directory(house), tmp_path / "canary"
    names = [path for path in directory.iterdir() if path.is_socket()]
    assert len(names) >= 3
    assert directory.stat().st_mode & 0o777 == 0o700
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in names)
    pickled = pickle.dumps(Bomb(canary))
    version = b"\x92\x01\x81\xa4type\xa7submit9"
    with house.neighbour(), zmq.Context() as context:
        for path in names:
            with socket.socket(socket.AF_UNIX) as raw:  # speaks no ZMQ at all
                raw.connect(str(path))
                raw.sendall(bytes(range(256)) * 16)
            with context.socket(zmq.PUSH) as peer:
                peer.connect(f"ipc://{path}")
                for data in (pickled, b"", b"\xff" * 100, b"\x91" * 100_000, version):
                    peer.send(data)
                peer.send_multipart([b"a", b"b"])
            with context.socket(zmq.PUSH) as peer:
                peer.connect(f"ipc://{path}")
                peer.send(bytes(65 << 20))
        counted = {name: 5 for name in ("engine-0", "supervisor", "worker-0")}
        until(lambda: all(dropped(house).get(name, 0) >= least for name, least in counted.items()), "all are counted")
    assert not canary.exists()


def dropped(house: House) -> dict[str, float]:
    """How many messages each process has dropped."""
    page = house.get("/metrics")[2].decode()
    found = re.findall(r'^llmcore_dropped_messages_total{process="([^"]+)"} (\S+)$', page, re.M)
    return {name: float(value) for name, value in found}


def test_a_stranger_who_says_hello_for_a_worker_harms_nobody(house: House) -> None:  # row 62
    """What is well formed and makes no sense: mailboxes that are none, workers that are not there."""
    hello = [json.dumps(name).encode() for name in ("nonsense", "ipc:///none/such", "")]
    with house.neighbour(), zmq.Context() as context, context.socket(zmq.PUSH) as peer:
        peer.connect(f"ipc://{run_directory(house)}/engine-0")
        for number, name in enumerate(hello):
            text = json.loads(name).encode()
            body = b"\x82\xa4type\xa5hello\xa7mailbox" + bytes([0xA0 | len(text)]) + text
            peer.send(b"\x92\xcd\x10" + bytes([number]) + body)
        peer.send(b"\x92\xcd\x11\x00\x82\xa4type\xa5abort\xa2id\x01")


@pytest.mark.parametrize("name", ["engine-0", "control"])
def test_the_inner_sockets_bound_what_they_take(house: House, name: str) -> None:  # row 62
    """A frame of a gigabyte is refused by its header: nothing is allocated for it."""
    with socket.socket(socket.AF_UNIX) as raw:
        raw.settimeout(PATIENCE)
        raw.connect(f"{run_directory(house)}/{name}")
        raw.sendall(b"\xff\0\0\0\0\0\0\0\1\x7f" + b"\3\0NULL" + bytes(16 + 32))  # ZMTP 3.0
        seen = raw.recv(64)
        assert seen[:1] == b"\xff"
        ready = b"\x05READY\x0bSocket-Type" + (4).to_bytes(4, "big") + b"PUSH"
        raw.sendall(b"\4" + bytes([len(ready)]) + ready)
        raw.sendall(b"\2" + (1 << 30).to_bytes(8, "big") + b"x" * 1000)
        with suppress(ConnectionResetError):
            while raw.recv(4096):
                pass


# --- 59, at random ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_kills_at_random_moments_hang_nobody_and_leak_nothing() -> None:
    script = Path(__file__).resolve().parents[2] / "benchmarks" / "kills.py"
    arguments = f"--kills 4 --streams 6 --seed 3 --patience {PATIENCE}"
    command = [sys.executable, str(script), *arguments.split()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "hung       0" in done.stdout and re.search(r"kills +4 \(.*engine.*worker", done.stdout)
