"""What a connection may take, and what becomes of one that takes more; with limits short enough to wait for."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Mapping
from contextlib import ExitStack

import pytest
from llmcore.api.errors import RequestError
from llmcore_devtools import sockets as raw
from llmcore_server.http.streaming.limits import BodyPace, Limits
from llmcore_server.http.strict import Bounds
from served import PATIENCE, POST, encoder, serving, until

CHUNKED = b"POST /detached HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
GET = raw.request("GET", "/plain")


def closed(sock: socket.socket) -> bool:
    """Whether the server has closed it, after whatever it still had to say."""
    try:
        while sock.recv(65536):
            pass
    except ConnectionError:
        pass
    return True


# --- time ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "begun",
    [
        b"G",
        b"GET /plain HTTP/1.1\r\nHost: x\r\nX: ",
        CHUNKED,
        CHUNKED + b"5\r\nhe",
        b"POST /detached HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\nx",
        b"POST /detached HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\nExpect: 100-continue\r\n\r\n",
    ],
)
def test_who_does_not_finish_a_request_in_time_is_told_so(begun: bytes) -> None:  # rows 10, 11
    start = time.monotonic()
    head_seconds = 60.0 if b"\r\n\r\n" in begun else 0.4
    with serving(head_seconds=head_seconds, body_seconds=0.4) as served, raw.connect(served.port) as sock:
        sock.sendall(begun)
        if b"Expect" in begun:
            assert sock.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
        status, headers, body = raw.read_reply(sock)
        assert (status, headers["connection"]) == (408, "close")
        assert "took too long" in json.loads(body)["error"]["message"]
        assert 0.4 <= time.monotonic() - start < 8.0
        assert closed(sock)


def test_dripping_helps_nobody() -> None:
    with serving(head_seconds=0.4, body_seconds=0.4) as served:
        for begun in (b"GET /plain HTTP/1.1\r\nX: ", CHUNKED + b"fffff\r\n"):
            with raw.connect(served.port) as sock:
                sock.sendall(begun)
                sock.settimeout(0.05)
                data = b""
                start = time.monotonic()
                while not data and time.monotonic() - start < 8:
                    sock.sendall(b"x")
                    try:
                        data = sock.recv(1000)
                    except TimeoutError:
                        continue
                assert b" 408 " in data


def test_a_body_that_keeps_its_rate_may_take_longer() -> None:
    with serving(body_seconds=0.6, rate=1000) as served, raw.connect(served.port) as sock:
        sock.sendall(b"POST /detached HTTP/1.1\r\nHost: x\r\nContent-Length: 30000\r\n\r\n")
        for _ in range(30):
            sock.sendall(b"x" * 1000)
            time.sleep(0.1)
        served.detached.wait(1)[0].respond(200, b"{}")
        assert raw.read_reply(sock)[0] == 200


@pytest.mark.parametrize("framing", [b"Content-Length: 33554432", b"Transfer-Encoding: chunked"])
def test_neither_a_fast_start_nor_a_large_announcement_pays_for_a_stall(framing: bytes) -> None:
    with serving(body_seconds=0.4) as served, raw.connect(served.port) as sock:
        start = time.monotonic()
        size = b"" if b"Length" in framing else b"2000000\r\n"
        sock.sendall(b"POST /detached HTTP/1.1\r\nHost: x\r\n" + framing + b"\r\n\r\n" + size + b"x" * (8 << 20))
        status, headers, body = raw.read_reply(sock)
        assert (status, headers["connection"]) == (408, "close")
        assert b"bytes a second" in body and 0.4 <= time.monotonic() - start < 8.0
        until(lambda: not served.server._channels())


def test_a_pace_is_measured_by_windows() -> None:
    limits = Limits(body_seconds=10.0, rate=1000)
    pace = BodyPace(limits, 0.0)
    assert not pace.is_late(9.9, 0) and not pace.is_late(10.0, 500_000)  # the first window asks for nothing
    assert not pace.is_late(19.9, 500_000) and not pace.is_late(20.0, 510_000)
    assert not pace.is_late(90.0, 520_000)  # nobody looked for a minute
    assert pace.is_late(100.0, 529_999)


@pytest.mark.parametrize("used", [False, True])
def test_an_idle_connection_is_closed(used: bool) -> None:
    start = time.monotonic()
    limits = {"head_seconds": 60.0, "idle_seconds": 1.2} if used else {"head_seconds": 0.3, "idle_seconds": 60.0}
    with serving(**limits) as served, raw.connect(served.port) as sock:
        if used:
            start = time.monotonic()
            sock.sendall(GET)
            raw.read_reply(sock)
        assert sock.recv(100) == b""
        assert (1.2 if used else 0.3) <= time.monotonic() - start < 8.0


def test_a_request_that_is_being_answered_may_take_any_time() -> None:
    with serving(head_seconds=1.0, body_seconds=1.0, idle_seconds=1.0) as served, raw.connect(served.port) as sock:
        sock.sendall(POST)
        (reply,) = served.detached.wait(1)
        time.sleep(1.8)
        reply.respond(200, b"{}")
        assert raw.read_reply(sock)[0] == 200


def test_what_came_while_the_server_stood_still_came_in_time() -> None:
    """With its machine, say: what lies there is read before anybody is late."""
    stands, goes_on = threading.Event(), threading.Event()
    with serving(head_seconds=0.5) as served, raw.connect(served.port) as sock:
        until(lambda: served.server._channels())
        served.server.loop.call(lambda: (stands.set(), goes_on.wait(PATIENCE)))
        assert stands.wait(PATIENCE)
        sock.sendall(GET)
        time.sleep(1.1)
        goes_on.set()
        assert raw.read_reply(sock)[2] == b"plain"


def test_clocks_that_jump_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:  # row 64
    real = time.time
    with serving() as served, raw.connect(served.port) as idle, raw.connect(served.port) as busy:
        idle.sendall(GET)
        raw.read_reply(idle)
        busy.sendall(POST)
        (reply,) = served.detached.wait(1)
        for jump in (3600.0, -3600.0):
            monkeypatch.setattr(time, "time", lambda jump=jump: real() + jump)
            time.sleep(0.7)
            idle.sendall(GET)
            assert raw.read_reply(idle)[2] == b"plain"
            reply.stream(b"x")
        reply.end()
        assert raw.read_reply(busy)[2] == b"xx"
        monkeypatch.undo()


# --- size ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("framing", [b"Content-Length: 67108864", b"Transfer-Encoding: chunked"])
def test_a_body_that_is_too_large_is_refused_while_it_comes(framing: bytes) -> None:  # row 6
    with serving(bounds=Bounds(body=1 << 20)) as served, raw.connect(served.port) as sock:
        sock.sendall(b"POST /detached HTTP/1.1\r\nHost: x\r\n" + framing + b"\r\n\r\n")
        sent = 0
        piece = b"10000\r\n" + b"x" * 65536 + b"\r\n"
        while sent < 4 << 20:  # the answer is not lost on who sends on without reading
            sock.sendall(piece)
            sent += len(piece)
        status, headers, body = raw.read_reply(sock)
        assert (status, headers["connection"]) == (413, "close")
        assert json.loads(body)["error"]["code"] == "request_too_large"
        assert served.detached.replies == []


def test_bodies_may_take_so_much_together() -> None:
    with serving(bodies=1 << 20) as served, ExitStack() as stack:
        first, second = (stack.enter_context(raw.connect(served.port)) for _ in range(2))
        for sock in (first, second):
            sock.sendall(b"POST /detached HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n")
        first.sendall(b"x" * 900_000)
        until(lambda: served.server.pool._free <= (1 << 20) - 900_000)
        second.sendall(b"x" * 900_000)
        status, headers, _ = raw.read_reply(second)
        assert (status, headers["retry-after"]) == (503, "1")
        first.sendall(b"x" * 100_000)
        served.detached.wait(1)[0].respond(200, b"{}")
        assert raw.read_reply(first)[0] == 200


def test_a_long_answer_reaches_a_reader_who_is_slow_but_reads() -> None:
    with serving(backlog_seconds=0.5, rate=1 << 20) as served, raw.connect(served.port) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
        sock.sendall(POST)
        served.detached.wait(1)[0].respond(200, b"x" * (12 << 20))
        time.sleep(1.2)
        assert len(raw.read_reply(sock)[2]) == 12 << 20


def test_nothing_is_read_after_what_is_no_request() -> None:  # row 1
    smuggled = (
        b"POST /detached HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
    )
    with serving() as served, raw.connect(served.port) as sock:
        sock.sendall(smuggled + POST + POST)
        assert raw.read_reply(sock)[0] == 400
        sock.sendall(POST)
        assert sock.recv(100) == b""
        time.sleep(0.1)
        assert served.detached.replies == []


def test_a_refusal_of_head_has_no_body() -> None:
    full = RequestError("full", status=429)
    with serving(admit=lambda *_: full) as served, raw.connect(served.port) as sock:
        for _ in range(2):
            sock.sendall(b"HEAD /plain HTTP/1.1\r\nHost: x\r\n\r\n")
            status, headers, body = raw.read_head(sock)
            assert (status, body) == (429, b"") and int(headers["content-length"]) > 0


# --- how many --------------------------------------------------------------------------------------------------------


def test_a_connection_beyond_the_limit_is_told_so_at_once() -> None:  # row 13
    with serving(connections=20) as served, ExitStack() as stack:
        socks = [stack.enter_context(raw.connect(served.port)) for _ in range(20)]
        for sock in socks:
            sock.sendall(GET)
            assert raw.read_reply(sock)[0] == 200
        for _ in range(30):
            status, headers, body = raw.call(served.port, "POST", "/detached", {})
            assert (status, headers["retry-after"], headers["connection"]) == (503, "1", "close")
            assert json.loads(body)["error"]["code"] == "server_overloaded"
        socks[0].close()
        until(lambda: raw.call(served.port, "GET", "/plain")[0] == 200)


def test_one_address_may_have_so_many() -> None:
    with serving(per_address=3) as served, ExitStack() as stack:
        for _ in range(3):
            sock = stack.enter_context(raw.connect(served.port))
            sock.sendall(GET)
            assert raw.read_reply(sock)[0] == 200
        assert raw.call(served.port, "GET", "/plain")[0] == 429
        until(lambda: len(served.server._channels()) == 3)
        sock.close()
        until(lambda: raw.call(served.port, "GET", "/plain")[0] == 200)
        assert served.server._by_address["127.0.0.1"] <= 3


# --- who is let in ---------------------------------------------------------------------------------------------------


def test_who_is_not_admitted_takes_no_thread_and_keeps_the_connection() -> None:
    asked: list[tuple[str, str]] = []

    def admit(method: str, path: str, headers: Mapping[str, str]) -> RequestError | None:
        asked.append((method, path))
        assert headers["HOST"] == "localhost"
        return RequestError("full", code="queue_full", status=429) if path == "/detached" else None

    with serving(admit=admit, encoder=encoder) as served, raw.connect(served.port) as sock:
        for _ in range(2):
            sock.sendall(POST)
            status, headers, body = raw.read_reply(sock)
            assert (status, headers["retry-after"], body) == (429, "1", b'{"mine":429}')
            assert "connection" not in headers
        sock.sendall(GET)
        assert raw.read_reply(sock)[2] == b"plain"
        # with its body still to come, the question whether to send it is answered by the refusal alone
        expect = "Content-Length: 5\r\nExpect: 100-continue\r\n"
        sock.sendall(raw.request("POST", "/detached", headers=expect))
        status, headers, _ = raw.read_reply(sock)
        assert (status, headers["connection"]) == (429, "close")
        assert sock.recv(100) == b""
        assert asked == [("POST", "/detached")] * 2 + [("GET", "/plain"), ("POST", "/detached")]


def test_pipelined_requests_are_refused_in_their_order() -> None:
    def admit(method: str, path: str, headers: Mapping[str, str]) -> RequestError | None:
        return RequestError("full", status=429) if path == "/detached" else None

    with serving(admit=admit) as served, raw.connect(served.port) as sock:
        sock.sendall(GET + POST)
        data = b""
        while more := sock.recv(65536):
            data += more
        assert data.index(b" 200 OK") < data.index(b" 429 Too Many Requests")
