"""The main loop on its own: who is called, when, and that no call from another thread is lost."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from llmcore_devtools import sockets as raw
from llmcore_server.http.streaming.loop import GONE, READ, WRITE, Loop, SendBatch
from served import POST, Served, until


@pytest.fixture
def loop() -> Iterator[Loop]:
    loop = Loop(SendBatch())
    yield loop
    loop.close()


def test_only_who_is_ready_is_called(loop: Loop) -> None:
    heard: list[tuple[str, int]] = []
    left, right = socket.socketpair()
    idle, other = socket.socketpair()
    with left, right, idle, other:
        loop.add(left.fileno(), READ, lambda events: heard.append(("left", events)))
        loop.add(idle.fileno(), READ, lambda events: heard.append(("idle", events)))
        loop.turn(0.0)
        assert heard == []
        right.send(b"x")
        loop.turn(1.0)
        assert heard == [("left", READ)]
        loop.change(left.fileno(), WRITE)
        loop.turn(1.0)
        assert heard[1:] == [("left", WRITE)]
        loop.change(left.fileno(), 0)
        loop.turn(0.0)
        assert len(heard) == 2
        right.close()  # whatever is watched for
        loop.turn(1.0)
        assert heard[2][1] & GONE
        loop.remove(left.fileno())
        loop.turn(0.0)
        assert len(heard) == 3


def test_who_is_removed_in_a_turn_is_not_called_in_it(loop: Loop) -> None:
    pairs = [socket.socketpair() for _ in range(2)]
    called: list[int] = []
    for mine, _ in pairs:
        loop.add(mine.fileno(), WRITE, lambda _: (called.append(1), [loop.remove(m.fileno()) for m, _ in pairs])[0])
    loop.turn(1.0)
    assert called == [1]
    for pair in pairs:
        for sock in pair:
            sock.close()


def test_no_call_is_lost(loop: Loop) -> None:
    done = 0

    def count() -> None:
        nonlocal done
        done += 1

    threads = [threading.Thread(target=lambda: [loop.call(count) for _ in range(5000)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    end = time.monotonic() + 60
    while done < 20_000 and time.monotonic() < end:
        loop.turn(5.0)  # a bell that nobody rang would keep it here
    for thread in threads:
        thread.join()
    assert done == 20_000 and time.monotonic() < end
    start = time.monotonic()
    loop.turn(0.05)  # at most one bell is left
    loop.turn(0.05)
    assert time.monotonic() - start >= 0.05


def test_a_call_wakes_it_and_after_the_end_it_does_nothing() -> None:
    loop = Loop(SendBatch())
    timer = threading.Timer(0.1, lambda: loop.call(lambda: None))
    timer.start()
    start = time.monotonic()
    loop.turn(10.0)
    assert time.monotonic() - start < 5.0
    loop.close()
    end, other = os.pipe()  # may have the bell's number now
    loop.call(lambda: None)
    os.close(other)
    assert os.read(end, 8) == b""
    os.close(end)


def test_a_turn_does_not_pay_for_who_waits() -> None:
    served = Served(connections=2000)
    try:
        with ExitStack() as stack, raw.connect(served.port) as sock:
            for _ in range(300):
                stack.enter_context(raw.connect(served.port))
            until(lambda: len(served.server.loop) == 303)  # its bell and who accepts are among them
            asked: list[int] = []
            for channel in served.server._channels():
                channel.readable = lambda real=channel.readable, fd=channel._fileno: (asked.append(fd), real())[1]
            sock.sendall(raw.request("GET", "/plain"))
            raw.read_reply(sock)
            time.sleep(0.05)
            assert len(set(asked)) == 1
    finally:
        served.end()


def test_what_a_socket_does_not_take_is_sent_when_it_does() -> None:
    served = Served(backlog=1 << 30)
    try:
        with raw.connect(served.port) as sock:
            sock.sendall(POST)
            (reply,) = served.detached.wait(1)
            for i in range(200):  # from another thread, while the loop sends what lies there
                reply.stream(b"%7d\n" % i * 8192)
            reply.end()
            body = raw.read_reply(sock)[2]
        assert body == b"".join(b"%7d\n" % i * 8192 for i in range(200))
    finally:
        served.end()
