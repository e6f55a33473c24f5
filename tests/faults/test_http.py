"""Rows 1 to 13 and 50 to 52: bytes that are no request, and clients that are too many, slow or gone."""

from __future__ import annotations

import json
import resource
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from conftest import MakeHouse
from harness import KEY, WORKER, House, until
from llmcore_devtools import sockets

POST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
BODY = b'{"prompt": [1, 2, 3], "max_tokens": 4}'
WHOLE = POST + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY
KEYED = POST + f"Authorization: Bearer {KEY}\r\n".encode()
CHUNKED = KEYED + b"Transfer-Encoding: chunked\r\n\r\n"
LONG = {"prompt": [5, 6, 7], "max_tokens": 3000, "stream": True}
LIMIT = 300


@pytest.fixture(scope="module")
def module_house(make_house: MakeHouse) -> Iterator[House]:
    with make_house(keys=True, max_connections=LIMIT) as house:
        yield house


def completion(stream: bool = False, tokens: int = 4, version: str = "1.1") -> bytes:
    body = {"prompt": [1, 2, 3], "max_tokens": tokens, "stream": stream, "temperature": 0}
    return sockets.request(
        "POST", "/v1/completions", body, headers=f"Authorization: Bearer {KEY}\r\n", version=version
    )


def last_word(sock: socket.socket) -> bytes:
    """Everything until the server closes."""
    data = b""
    with suppress(ConnectionError):
        while more := sock.recv(1 << 16):
            data += more
    return data


def refusal(house: House, data: bytes) -> int:
    """The status `data` is refused with, at once, in our shape, and with a close."""
    with sockets.connect(house.port) as sock:
        start = time.monotonic()
        with suppress(ConnectionError):
            sock.sendall(data)
        status, headers, body = sockets.read_reply(sock)
        assert time.monotonic() - start < 20.0
        assert headers["connection"] == "close" and headers["content-type"] == "application/json"
        error = json.loads(body)["error"]
        assert set(error) == {"message", "type", "param", "code"} and error["message"]
        assert last_word(sock) == b""
        return status


@pytest.mark.parametrize(
    ("row", "data", "status"),
    [
        (1, POST + b"Content-Length: 38\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + WHOLE, 400),
        (2, POST + b"Content-Length: 38\r\nContent-Length: 38\r\n\r\n" + BODY, 400),
        (2, POST + b"Content-Length: +2\r\n\r\n{}", 400),
        (2, POST + b"Content-Length: 0x2\r\n\r\n{}", 400),
        (2, POST + b"Content-Length: -1\r\n\r\n", 400),
        (2, POST + b"Content-Length: " + b"7" * 5000 + b"\r\n\r\n", 400),
        (3, POST + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n", 501),
        (3, POST + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n", 501),
        (6, KEYED + b"Content-Length: 33554433\r\n\r\n", 413),
        (6, CHUNKED + b"2000001\r\n", 413),
        (7, b"GET /health HTTP/1.1\r\nHost: x\r\nX: " + b"y" * 300_000, 431),
        (7, b"GET /health HTTP/1.1\r\nHost: x\r\n" + b"X: y\r\n" * 2000 + b"\r\n", 431),
        (7, b"GET /health HTTP/1.1\r\nHost: x\r\nX: a\x00b\r\n\r\n", 400),
        (7, b"GET /health HTTP/1.1\nHost: x\n\n", 400),
        (8, b"GET /v1/models HTTP/1.1\r\n\r\n", 400),
        (8, b"GET /v1/models HTTP/1.1\r\nHost: x\r\nHost: y\r\n\r\n", 400),
        (8, b"GET /v1/models HTTP/1.1\r\nHost: x/health?\r\n\r\n", 400),
        (8, b"GET http://x@y/health HTTP/1.1\r\nHost: x\r\n\r\n", 400),
        (8, b"GET http://x/health HTTP/1.1\r\n\r\n", 400),
        (12, b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\xaa" * 400, 400),
        (12, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
        (12, b"get /health HTTP/1.1\r\nHost: x\r\n\r\n", 400),
        (12, b"\r\r\r\n\n", 400),
        (19, POST + b"Authorization: Bearer a\r\nAuthorization: Bearer b\r\n\r\n", 400),
    ],
)
def test_what_is_no_request_is_refused_and_closed(house: House, row: int, data: bytes, status: int) -> None:
    assert refusal(house, data) == status


def test_a_whole_url_opens_nothing_that_its_path_does_not(house: House) -> None:
    def answers(target: str, headers: str = "", method: str = "GET") -> tuple[int, bytes]:
        data = f"{method} {target} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n{headers}\r\n"
        with sockets.connect(house.port) as sock:
            sock.sendall(data.encode())
            status, _, begun = sockets.read_head(sock)
            return status, begun + last_word(sock)

    key = f"Authorization: Bearer {KEY}\r\n"
    for host in ("http://a.test", "HTTPS://[::1]:80"):
        assert answers(f"{host}/health")[0] == 200
        assert answers(f"{host}/v1/models", key) == answers("/v1/models", key)
        for path in ("/v1/models", "//health", "/http://x/health", "/health/", "?/health", ""):
            assert answers(host + path)[0] == 401, path
    assert answers("*", method="OPTIONS")[0] == 401
    assert answers("*", key, method="OPTIONS") == (204, b"")


def test_lines_without_end(house: House) -> None:  # row 4
    before = house.worker_cpu()
    for begun in (b"1;", b"0\r\nX: "):
        assert refusal(house, CHUNKED + begun + b"x" * (2 << 20)) == 400
    assert house.worker_cpu() - before < 0.25


def test_three_million_chunks_of_a_byte(house: House) -> None:  # row 5
    with house.neighbour():
        before = house.worker_cpu()
        assert refusal(house, CHUNKED + b"1\r\nx\r\n" * 3_000_000) == 400
        assert house.worker_cpu() - before < 1.0


def test_a_body_of_any_size_takes_no_memory(house: House) -> None:  # row 6
    pid = house.processes()[WORKER]
    status = Path(f"/proc/{pid}/status")
    before = int(status.read_text().partition("VmHWM:")[2].split()[0])
    for _ in range(3):
        assert refusal(house, KEYED + b"Content-Length: 33554433\r\n\r\n" + b"x" * (8 << 20)) == 413
    assert int(status.read_text().partition("VmHWM:")[2].split()[0]) - before < 2048


def test_bodies_without_a_key_cost_nobody_anything(house: House) -> None:  # row 67
    status = Path(f"/proc/{house.processes()[WORKER]}/status")
    before = int(status.read_text().partition("VmHWM:")[2].split()[0])
    with house.neighbour(), ExitStack() as stack:
        for framing in (b"Content-Length: 33554432\r\n\r\n", b"Transfer-Encoding: chunked\r\n\r\n2000000\r\n"):
            for _ in range(33):
                sock = stack.enter_context(sockets.connect(house.port))
                sock.sendall(POST + framing + b"x" * (2 << 20))
            for _ in range(10):
                assert house.send(completion())[0] == 200
            assert sockets.read_reply(sock)[0] == 401
    assert int(status.read_text().partition("VmHWM:")[2].split()[0]) - before < 8192


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ("Host: localhost\r\n", 200),
        ("Host: evil.test\r\n", 403),
        ("Host: evil.test\r\nOrigin: http://evil.test\r\n", 403),
        ("Host: localhost\r\nOrigin: https://evil.test\r\n", 403),
        ("Host: localhost\r\nOrigin: https://evil.test\r\nContent-Type: text/plain\r\n", 403),
        ("Host: localhost\r\nOrigin: http://localhost\r\n", 415),
        ("Host: localhost\r\nOrigin: http://localhost\r\nContent-Type: application/json\r\n", 200),
    ],
)
def test_pages_where_no_key_is_wanted(common_house: House, headers: str, status: int) -> None:  # row 69
    length = f"Content-Length: {len(BODY)}\r\n\r\n".encode()
    for path in ("/v1/completions", "/metrics", "/health", "/nowhere"):
        method = "POST" if path == "/v1/completions" else "GET"
        got, _, answer = common_house.send(f"{method} {path} HTTP/1.1\r\n{headers}".encode() + length + BODY)
        assert got == (status if method == "POST" or status == 403 else 404 if path == "/nowhere" else 200)
        assert got != 403 or b"--allow" in answer


def test_two_requests_at_once_and_away(house: House) -> None:  # row 9
    request = sockets.request("POST", "/v1/completions", LONG, headers=f"Authorization: Bearer {KEY}\r\n")
    with sockets.connect(house.port) as sock:
        sock.sendall(request + request)
        sockets.read_head(sock)
    until(lambda: house.figures()["kv_live"] == 0, "both are freed")


@pytest.mark.slow
def test_five_hundred_slow_headers(common_house: House) -> None:  # row 10
    house = common_house
    with ExitStack() as stack:
        socks = [stack.enter_context(sockets.connect(house.port)) for _ in range(500)]
        start = time.monotonic()
        stop = threading.Event()

        def drip() -> None:
            for byte in b"GET /health HTTP/1.1\r\nX: yyy":
                for sock in socks:
                    with suppress(OSError):
                        sock.sendall(bytes([byte]))
                if stop.wait(1.0):
                    return

        thread = threading.Thread(target=drip)
        thread.start()
        try:
            with house.neighbour():
                worst = 0.0
                for _ in range(20):
                    asked = time.monotonic()
                    assert house.get("/health")[0] == 200
                    worst = max(worst, time.monotonic() - asked)
                assert worst < 5.0, "they wait for the slow ones, which takes ten seconds"
            for sock in socks[::25]:
                assert sockets.read_reply(sock)[0] == 408
            assert time.monotonic() - start > 9.0
        finally:
            stop.set()
            thread.join()
    house.check()


def test_expect_is_answered_before_the_body(house: House) -> None:  # row 11, without the silence
    head, _, body = completion().partition(b"\r\n\r\n")
    with sockets.connect(house.port) as sock:
        sock.sendall(head + b"\r\nExpect: 100-continue\r\n\r\n")
        assert sock.recv(1000) == b"HTTP/1.1 100 Continue\r\n\r\n"
        sock.sendall(body)
        assert sockets.read_reply(sock)[0] == 200


def test_connections_up_to_the_limit_and_beyond(house: House) -> None:  # row 13
    request = sockets.request("GET", "/health")
    with ExitStack() as stack:
        socks = [stack.enter_context(sockets.connect(house.port)) for _ in range(LIMIT)]
        for sock in socks:
            sock.sendall(request)
        assert [sockets.read_reply(sock)[0] for sock in socks] == [200] * LIMIT
        for _ in range(100):
            start = time.monotonic()
            status, headers, body = house.send(completion())
            assert (status, headers["retry-after"], headers["connection"]) == (503, "1", "close")
            assert time.monotonic() - start < 5.0
        assert b"too many connections" in body
        socks[0].sendall(completion())
        assert sockets.read_reply(socks[0])[0] == 200
    until(lambda: house.send(request)[0] == 200, "there is room again")


def test_eleven_hundred_connections_are_served(common_house: House) -> None:  # row 13
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 1300:
        pytest.skip("this process may not open so many files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 1300), hard))
    with ExitStack() as stack:
        socks = [stack.enter_context(sockets.connect(common_house.port)) for _ in range(1100)]
        for sock in socks:
            sock.sendall(sockets.request("GET", "/health"))
        assert [sockets.read_reply(sock)[0] for sock in socks] == [200] * 1100
        with common_house.neighbour():
            pass
    common_house.check()


def test_a_storm_of_clients_that_leave(house: House) -> None:  # row 50
    with house.neighbour():
        for i in range(1000):
            with socket.create_connection(("127.0.0.1", house.port)) as sock:
                sock.sendall(completion(stream=i % 2 == 0, tokens=500))


def test_who_never_reads_does_not_hold_anybody_up(house: House) -> None:  # row 51: cut after 30 s, or 1 MB
    with house.neighbour(), ExitStack() as stack:
        for _ in range(20):
            sock = stack.enter_context(socket.socket())
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.connect(("127.0.0.1", house.port))
            sock.sendall(completion(stream=True, tokens=400))


@pytest.mark.parametrize("stream", [False, True])
def test_who_only_stops_sending_gets_the_full_answer(house: House, stream: bool) -> None:  # row 52
    with sockets.connect(house.port) as sock:
        sock.sendall(completion(stream, tokens=200))
        sock.shutdown(socket.SHUT_WR)
        answer = last_word(sock)
    head, _, body = answer.removeprefix(b"HTTP/1.1 100 Continue\r\n\r\n").partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200")
    if stream:
        assert body.endswith(b"0\r\n\r\n") and b"data: [DONE]" in body
    else:
        assert json.loads(body)["usage"]["completion_tokens"] == 200
