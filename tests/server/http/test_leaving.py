"""Clients that stop sending, or leave: who only does the one is answered, who left is noticed at once."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import ExitStack

import pytest
from llmcore_devtools import sockets as raw
from llmcore_server.http.streaming import Limits
from served import POST, serving, soon, until

GET = raw.request("GET", "/plain")


@pytest.mark.parametrize("when", ["at once", "before", "between"])
def test_who_only_stops_sending_gets_a_stream_to_its_end(when: str) -> None:  # row 52
    with serving() as served, raw.connect(served.port) as sock:
        sock.sendall(POST)
        if when == "at once":
            sock.shutdown(socket.SHUT_WR)
        (reply,) = served.detached.wait(1)
        if when == "before":
            sock.shutdown(socket.SHUT_WR)
            time.sleep(0.1)
        reply.stream(b"data: 1\n\n")
        if when == "between":
            sock.shutdown(socket.SHUT_WR)
        time.sleep(0.1)
        reply.stream(b"data: 2\n\n")
        reply.end()
        data = b""
        while more := sock.recv(65536):
            data += more
        while data.startswith(b"HTTP/1.1 100 Continue\r\n\r\n"):
            data = data.partition(b"\r\n\r\n")[2]
        head, _, body = data.partition(b"\r\n\r\n")
        events = raw.unchunk(body).split(b"\n\n")
        assert head.startswith(b"HTTP/1.1 200")
        assert [event for event in events if event and not event.startswith(b":")] == [b"data: 1", b"data: 2"]
        assert body.endswith(b"0\r\n\r\n")
        assert served.detached.left == []


def test_who_only_stops_sending_gets_a_whole_answer() -> None:  # row 52
    with serving() as served:
        for data in (POST, GET, GET + GET):
            with raw.connect(served.port) as sock:
                sock.sendall(data)
                sock.shutdown(socket.SHUT_WR)
                if data == POST:
                    (reply,) = served.detached.wait(1)
                    time.sleep(0.1)
                    reply.respond(200, b"plain")
                answer = b""
                while more := sock.recv(65536):
                    answer += more
                assert answer.count(b"\r\n\r\nplain") == data.count(b" /")


@pytest.mark.parametrize("streaming_first", [True, False])
@pytest.mark.parametrize("half_first", [True, False])
def test_who_leaves_is_noticed_within_a_tenth_of_a_second(half_first: bool, streaming_first: bool) -> None:  # row 49
    def leave() -> float:
        before = len(served.detached.replies)
        with raw.connect(served.port) as sock:
            sock.sendall(POST)
            reply = served.detached.wait(before + 1)[-1]
            if streaming_first:
                reply.stream(b"data: 1\n\n")
            if half_first:
                sock.shutdown(socket.SHUT_WR)
                time.sleep(0.2)
                assert not reply.closed
            start = time.monotonic()
            sock.close()
            if half_first:  # nothing tells us before the next word to it
                reply.stream(b"data: 2\n\n")
            until(lambda: reply.closed)
            return time.monotonic() - start

    with serving() as served:
        soon(0.1, leave)


def test_an_old_client_that_stops_sending_has_left() -> None:
    with serving() as served, raw.connect(served.port) as sock:
        sock.sendall(raw.request("POST", "/detached", {}, version="1.0"))
        (reply,) = served.detached.wait(1)
        sock.shutdown(socket.SHUT_WR)
        until(lambda: reply.closed)
    with serving() as served, raw.connect(served.port) as sock:
        sock.sendall(raw.request("GET", "/plain", version="1.0"))
        sock.shutdown(socket.SHUT_WR)
        assert raw.read_reply(sock)[2] == b"plain"


def test_two_requests_at_once_and_away() -> None:  # row 9
    def leave() -> float:
        before = len(served.detached.replies)
        with raw.connect(served.port) as sock:
            sock.sendall(POST + POST)
            reply = served.detached.wait(before + 1)[-1]
            start = time.monotonic()
        until(lambda: reply.closed and not served.server._channels())
        took = time.monotonic() - start
        assert len(served.detached.replies) == before + 1
        return took

    with serving() as served:
        soon(0.1, leave)


def test_a_storm_of_clients_that_leave_keeps_nothing() -> None:  # row 50
    with serving() as served:
        for _ in range(500):
            with raw.connect(served.port) as sock:
                sock.sendall(POST)
        until(lambda: not served.server._channels())
        until(lambda: len(served.detached.left) == len(served.detached.replies))
        assert len(served.server.loop) == 2  # its bell, and who accepts
        assert not served.server._by_address
        assert raw.call(served.port, "GET", "/plain")[0] == 200


def test_five_hundred_slow_clients_do_not_hold_up_the_next() -> None:  # row 10
    with serving(head_seconds=60.0) as served, ExitStack() as stack:
        socks = [stack.enter_context(raw.connect(served.port)) for _ in range(500)]
        dripping = threading.Event()

        def drip() -> None:
            for byte in b"GET /plain HTTP/1.1\r\nX: yyyyyy":
                for sock in socks:
                    try:
                        sock.sendall(bytes([byte]))
                    except OSError:
                        continue
                if dripping.wait(0.05):
                    return

        def ask() -> float:
            start = time.monotonic()
            assert raw.call(served.port, "GET", "/plain")[0] == 200
            return time.monotonic() - start

        thread = threading.Thread(target=drip)
        thread.start()
        try:
            soon(1.0, lambda: max(ask() for _ in range(10)))
        finally:
            dripping.set()
            thread.join()
        assert len(served.server._channels()) >= 500, "nobody was given up to serve the next"
        for channel in served.server._channels():
            channel._limits = Limits(head_seconds=0.1)
        for sock in socks:
            assert raw.read_reply(sock)[0] == 408
