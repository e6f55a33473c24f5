from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator

import falcon
import pytest
from llmcore.api.errors import ConfigError
from llmcore_devtools import sockets as raw
from llmcore_server.http.errors import openai_error
from llmcore_server.http.streaming import HttpServer, channel, raise_open_files
from served import PATIENCE, POST, Served, soon, until


@pytest.fixture
def served() -> Iterator[Served]:
    served = Served()
    yield served
    served.end()


def test_a_stream_is_chunked_and_closes_its_connection(served: Served) -> None:
    with raw.connect(served.port) as sock:
        sock.sendall(raw.request("POST", "/detached", {}, headers="x-request-id: mine-1\r\n"))
        (reply,) = served.detached.wait(1)
        reply.stream(b"data: 1\n\n")
        status, headers, body = raw.read_head(sock)
        assert status == 200
        assert headers["content-type"] == "text/event-stream; charset=utf-8"
        assert headers["cache-control"] == "no-cache"
        assert headers["x-request-id"] == "mine-1"
        assert headers["connection"] == "close"
        assert "server" not in headers
        reply.stream(b"data: 2\n\n")
        reply.end()
        while more := sock.recv(65536):
            body += more
        assert raw.unchunk(body) == b"data: 1\n\ndata: 2\n\n"
        assert body.endswith(b"0\r\n\r\n")


def test_a_stream_may_be_lines_of_json(served: Served) -> None:
    with raw.connect(served.port) as sock:
        sock.sendall(raw.request("POST", "/detached", {}))
        (reply,) = served.detached.wait(1)
        reply.stream_as("application/x-ndjson")
        reply.stream(b'{"a": 1}\n')
        _, headers, body = raw.read_head(sock)
        assert headers["content-type"] == "application/x-ndjson"
        reply.probe()
        reply.stream(b'{"a": 2}\n')
        reply.end()
        while more := sock.recv(65536):
            body += more
        assert [json.loads(line) for line in raw.unchunk(body).splitlines()] == [{"a": 1}, {"a": 2}]


def test_what_is_sent_before_the_thread_let_go_is_kept(served: Served) -> None:
    real = served.detached.on_post

    def on_post(req: falcon.Request, resp: falcon.Response) -> None:
        real(req, resp)
        served.detached.replies[-1].stream(b"early")
        served.detached.replies[-1].end()

    served.detached.on_post = on_post  # type: ignore[method-assign]
    app = falcon.App()
    app.add_route("/detached", served.detached)
    served.server._server.application = app
    assert raw.call(served.port, "POST", "/detached", {})[2] == b"early"


def test_a_whole_answer_keeps_the_connection(served: Served) -> None:
    with raw.connect(served.port) as sock:
        for i in range(1, 4):
            sock.sendall(POST)
            served.detached.wait(i)[-1].respond(201, b"[%d]" % i, headers={"X-More": "yes"})
            status, headers, body = raw.read_reply(sock)
            assert (status, body) == (201, b"[%d]" % i)
            assert headers["content-type"] == "application/json"
            assert headers["x-more"] == "yes"
            assert "connection" not in headers
        sock.sendall(raw.request("GET", "/plain"))
        assert raw.read_reply(sock)[2] == b"plain"


def test_a_client_that_wants_it_closed_gets_it_closed(served: Served) -> None:
    for i, extra in enumerate(({"headers": "Connection: close\r\n"}, {"version": "1.0"}), 1):
        with raw.connect(served.port) as sock:
            sock.sendall(raw.request("POST", "/detached", {}, **extra))
            served.detached.wait(i)[-1].respond(200, b"{}")
            assert raw.read_reply(sock)[1]["connection"] == "close"
            assert sock.recv(10) == b""


def test_http_1_0_streams_without_chunks(served: Served) -> None:
    with raw.connect(served.port) as sock:
        sock.sendall(raw.request("POST", "/detached", {}, version="1.0"))
        (reply,) = served.detached.wait(1)
        reply.stream(b"a")
        reply.stream(b"b")
        reply.end()
        data = b""
        while more := sock.recv(65536):
            data += more
        assert data.endswith(b"\r\n\r\nab")


@pytest.mark.parametrize("streaming_first", [True, False])
def test_a_client_that_leaves_is_noticed_at_once(served: Served, streaming_first: bool) -> None:
    def leave() -> float:
        known = len(served.detached.replies)
        with raw.connect(served.port) as sock:
            sock.sendall(POST)
            reply = served.detached.wait(known + 1)[-1]
            if streaming_first:
                reply.stream(b"data: 1\n\n")
                raw.read_head(sock)
        start = time.monotonic()
        until(lambda: served.detached.left == served.detached.replies)
        took = time.monotonic() - start
        assert reply.closed
        reply.stream(b"to nobody")
        reply.end()
        return took

    soon(0.2, leave)
    assert raw.call(served.port, "GET", "/plain")[2] == b"plain"


def test_on_close_after_the_client_left_is_called_at_once(served: Served) -> None:
    with raw.connect(served.port) as sock:
        sock.sendall(POST)
        (reply,) = served.detached.wait(1)
    until(lambda: reply.closed)
    late: list[int] = []
    reply.on_close(lambda: late.append(1))
    assert late == [1]


def test_an_answered_request_does_not_count_as_left(served: Served) -> None:
    with raw.connect(served.port) as sock:
        sock.sendall(POST)
        (reply,) = served.detached.wait(1)
        reply.respond(200, b"{}")
        raw.read_reply(sock)
    time.sleep(0.1)
    assert served.detached.left == []


def test_a_responder_that_fails_after_detaching_answers_with_its_error(served: Served) -> None:
    status, _, body = raw.call(served.port, "POST", "/detached?fail=true", {})
    assert (status, body) == (400, b"refused")
    until(lambda: len(served.detached.left) == 1)


def test_a_second_request_meanwhile_is_dropped_and_the_connection_closes(served: Served) -> None:
    with raw.connect(served.port) as sock:
        sock.sendall(POST)
        (reply,) = served.detached.wait(1)
        sock.sendall(POST)
        until(lambda: served.server._channels()[0]._extra)
        reply.respond(200, b"{}")
        assert raw.read_reply(sock)[1]["connection"] == "close"
        assert sock.recv(10) == b""
    assert len(served.detached.replies) == 1


def test_two_pipelined_requests_get_one_answer_and_a_close(served: Served) -> None:
    with raw.connect(served.port) as sock:
        sock.sendall(POST + POST)
        served.detached.wait(1)[0].respond(200, b"{}")
        assert raw.read_reply(sock)[1]["connection"] == "close"
        assert sock.recv(10) == b""


def test_a_pipelining_client_that_leaves_is_noticed(served: Served) -> None:
    def leave() -> float:
        known = len(served.detached.replies)
        with raw.connect(served.port) as sock:
            sock.sendall(POST + POST + POST)
            served.detached.wait(known + 1)
        start = time.monotonic()
        until(lambda: len(served.detached.left) > known)
        return time.monotonic() - start

    soon(0.2, leave)


def test_a_slow_reader_is_cut_off(served: Served) -> None:
    with raw.connect(served.port) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.sendall(POST)
        (reply,) = served.detached.wait(1)
        for _ in range(400):
            before = time.monotonic()
            reply.stream(b"x" * 65536)
            assert time.monotonic() - before < 5.0, "a send blocked"
        until(lambda: served.detached.left == [reply])


@pytest.mark.parametrize("pushes", [True, False])
def test_a_reader_that_stays_behind_is_cut_off(pushes: bool) -> None:
    served = Served(backlog=1 << 30, backlog_seconds=0.3)
    with raw.connect(served.port) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.sendall(POST)
        (reply,) = served.detached.wait(1)
        reply.stream(b"x" * (8 << 20))
        start = time.monotonic()
        while not reply.closed:
            if pushes:
                reply.stream(b"x" * 65536)
            time.sleep(0.01)
            assert time.monotonic() - start < 15
    served.end()


def test_two_hundred_streams_at_once(served: Served) -> None:
    n, events = 200, 20
    socks = [socket.create_connection(("127.0.0.1", served.port), timeout=60) for _ in range(n)]
    try:
        for sock in socks:
            sock.sendall(POST)
        replies = served.detached.wait(n)
        for i in range(events):
            for reply in replies:
                reply.stream(b"data: %d\n\n" % i)
        for reply in replies:
            reply.end()
        expected = b"".join(b"data: %d\n\n" % i for i in range(events))
        for sock in socks:
            assert raw.read_reply(sock)[2] == expected
    finally:
        for sock in socks:
            sock.close()
    assert served.detached.left == []


@pytest.mark.parametrize(
    ("lines", "status", "code"),
    [
        (b"Content-Length: 99999999999\r\n", 413, b'"request_too_large"'),
        (b"Padding: " + b"x" * 40_000 + b"\r\n", 431, b'"request_too_large"'),
        (b"Transfer-Encoding: gzip\r\n", 501, b"null"),
        (b"Content-Length: 1\r\nContent-Length: 2\r\n", 400, b"null"),
    ],
)
def test_what_waitress_refuses_is_json(served: Served, lines: bytes, status: int, code: bytes) -> None:
    with raw.connect(served.port) as sock:
        sock.sendall(b"POST /plain HTTP/1.1\r\nHost: x\r\n" + lines + b"\r\n")
        got, headers, body = raw.read_reply(sock)
        assert (got, headers["content-type"], headers["connection"]) == (status, "application/json", "close")
    assert headers["x-request-id"]
    assert b'"code":' + code in body and b"waitress" not in body


def test_stop_lets_streams_finish_and_answers_who_comes_meanwhile(served: Served) -> None:
    with raw.connect(served.port) as sock, raw.connect(served.port) as idle:
        idle.sendall(b"GET /plain HTTP/1.1\r\nHost: x\r\n\r\n")
        assert "connection" not in raw.read_reply(idle)[1]
        sock.sendall(POST)
        (reply,) = served.detached.wait(1)
        reply.stream(b"1")
        served.server.stop(PATIENCE)
        assert idle.recv(1) == b""
        status, headers, _ = raw.call(served.port, "GET", "/plain")
        assert (status, headers["connection"]) == (200, "close")
        reply.stream(b"2")
        reply.end()
        assert raw.read_reply(sock)[2] == b"12"
    served.thread.join(PATIENCE)
    assert not served.thread.is_alive()
    assert _refused(served.port)


def test_who_has_just_connected_when_the_end_begins_is_answered(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel, "FRESH_SECONDS", PATIENCE)
    with raw.connect(served.port) as sock:
        until(lambda: served.server._channels())
        served.server.stop(PATIENCE)
        until(lambda: served.server._server.draining)
        sock.sendall(raw.request("GET", "/plain"))
        status, headers, _ = raw.read_reply(sock)
        assert (status, headers["connection"]) == (200, "close")
    served.thread.join(PATIENCE)
    assert not served.thread.is_alive()


def test_stop_without_grace_refuses_at_once(served: Served) -> None:
    with raw.connect(served.port) as sock:
        sock.sendall(POST)
        served.detached.wait(1)
        served.server.stop(0)
        until(lambda: _refused(served.port))


def test_stop_ends_what_outlasts_the_grace() -> None:
    served = Served()
    served.server.stop(0)
    served.thread.join(PATIENCE)
    listener = socket.create_server(("127.0.0.1", 0))
    app = falcon.App()
    app.add_route("/detached", served.detached)
    server = HttpServer(app, listener, connections=100)
    thread = threading.Thread(target=server.run, args=(None, lambda: served.detached.replies[0].end()))
    thread.start()
    with raw.connect(listener.getsockname()[1]) as sock:
        sock.sendall(POST)
        (reply,) = served.detached.wait(1)
        reply.stream(b"1")
        server.stop(0.2)
        assert raw.read_reply(sock)[2] == b"1"
    thread.join(PATIENCE)
    assert not thread.is_alive()


@pytest.mark.parametrize(("method", "body"), [("POST", b'{"mine":500}'), ("HEAD", b"")])
def test_an_application_that_fails_is_answered_for_in_the_dialect_that_was_asked(method: str, body: bytes) -> None:
    def fail(environ: object, start_response: object) -> list[bytes]:
        raise RuntimeError("broken")

    listener = socket.create_server(("127.0.0.1", 0))
    encoders = {"/mine": lambda error: b'{"mine":%d}' % error.status}
    server = HttpServer(fail, listener, connections=9, encoder=lambda path: encoders.get(path, openai_error))
    thread = threading.Thread(target=server.run)
    thread.start()
    with raw.connect(listener.getsockname()[1]) as sock:
        sock.sendall(raw.request(method, "/mine"))
        status, headers, rest = raw.read_head(sock)
        assert (status, headers["connection"], headers["content-length"]) == (500, "close", "12")
        while more := sock.recv(100):
            rest += more
        assert rest == body
    server.stop(0)
    thread.join(PATIENCE)
    assert not thread.is_alive()


def _refused(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return True
    return False


def test_a_limit_of_open_files_that_cannot_be_met_says_how_to_raise_it() -> None:
    with pytest.raises(ConfigError, match=r"ulimit -Hn"):
        raise_open_files(1 << 40)
