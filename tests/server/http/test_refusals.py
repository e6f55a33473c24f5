"""What is refused before it is a whole request: in whose shape, in which version of HTTP, and what HEAD gets."""

from __future__ import annotations

from contextlib import suppress

import pytest
from llmcore_devtools import sockets as raw
from llmcore_server.http.strict import Bounds
from served import encoder, last_word, serving

CHUNKS = b"Host: x\r\nTransfer-Encoding: chunked\r\n\r\n"
BAD_HEADS = [
    (b"/detached?a=b", b"Host: x/health?\r\n", 400),
    (b"/%64etached", b"Host: x:99999\r\n", 400),
    (b"/detached", b"Host: x\r\nContent-Length: +2\r\n", 400),
    (b"/detached", b"Host: x\r\nContent-Length: 99999999\r\n", 413),
    (b"/detached", b"Host: x\r\n" + b"X: y\r\n" * 200, 431),
    (b"/detached", b"X: " + b"y" * 40_000, 431),
    (b"/detached?" + b"y" * 40_000, b"", 431),
    (b"/detached", b"Host: x\r\nX: a\x00b\r\n", 400),
]
"""Targets, header lines, and what they are refused with in both versions of HTTP."""
BAD_IN_NEW = [
    (b"/detached", b"", 400),
    (b"/detached", b"Host: x\r\nExpect: magic\r\n", 417),
    (b"/detached", b"Host: x\r\nTransfer-Encoding: gzip\r\n", 501),
    (b"/detached", CHUNKS + b"x\r\n", 400),
    (b"/detached", CHUNKS + b"2000001\r\n", 413),
]
"""Those of HTTP/1.1 alone."""


@pytest.mark.parametrize("pieces", [1, 400])
@pytest.mark.parametrize(
    ("version", "line", "rest", "status"),
    [(b"1.1", *case) for case in (*BAD_HEADS, *BAD_IN_NEW)] + [(b"1.0", *case) for case in BAD_HEADS],
)
@pytest.mark.parametrize("method", [b"POST", b"HEAD"])
def test_what_is_refused_by_its_head_is_answered_as_it_asked(
    method: bytes, version: bytes, line: bytes, rest: bytes, status: int, pieces: int
) -> None:
    """In the dialect of its path, in its version of HTTP where its line can be read, and without a body for HEAD."""
    answered = version if len(line) < Bounds().head else b"1.1"
    data = b"%b %b HTTP/%b\r\n%b\r\n" % (method, line, version, rest)
    step = len(data) // pieces + 1
    with serving(encoder=encoder, bounds=Bounds(body=1 << 20)) as served, raw.connect(served.port) as sock:
        with suppress(ConnectionError):
            for at in range(0, len(data), step):
                sock.sendall(data[at : at + step])
        answer = last_word(sock)
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/%b %d " % (answered, status)), head
    assert b"\r\nConnection: close\r\n" in head and b"\r\nContent-Length: 12\r\n" in head
    assert body == (b"" if method == b"HEAD" else b'{"mine":%d}' % status)


@pytest.mark.parametrize(
    ("data", "start", "body"),
    [
        (b"HEAD /detached HTTP/2.0\r\n\r\n", b"HTTP/1.1 400 ", b""),
        (b"POST /detached HTTP/2.0\r\n\r\n", b"HTTP/1.1 400 ", b'{"mine":400}'),
        (b"HEAD http://u@x/ HTTP/1.0\r\n\r\n", b"HTTP/1.0 400 ", b""),
        (b"POST detached HTTP/1.0\r\n\r\n", b"HTTP/1.0 400 ", b'{"error"'),
        (b"POST /detached", b"HTTP/1.1 408 ", b'{"error"'),
        (b"HEAD /detached HTTP/1.0\r\nX:", b"HTTP/1.0 408 ", b""),
        (b"POST /detached HTTP/1.1\r\nX:", b"HTTP/1.1 408 ", b'{"mine":408}'),
        (b"POST /detached HTTP/1.0\r\nContent-Length: 9\r\n\r\nx", b"HTTP/1.0 408 ", b'{"mine":408}'),
        (b"POST /detached?" + b"y" * 40_000, b"HTTP/1.1 431 ", b'{"mine":431}'),
        (b"HEAD /" + b"y" * 40_000, b"HTTP/1.1 431 ", b""),
        (b"POST /detached" + b"y" * 40_000, b"HTTP/1.1 431 ", b'{"error"'),
        (b"head /detached HTTP/1.0\r\n\r\n", b"HTTP/1.0 400 ", b'{"mine":400}'),
        (b"\x16\x03\x01\x02\x00\x01", b"HTTP/1.1 400 ", b'{"error"'),
    ],
    ids=range(13),
)
def test_what_was_meant_is_guessed_for_the_refusal(data: bytes, start: bytes, body: bytes) -> None:
    limits = {"head_seconds": 0.2, "body_seconds": 0.2, "linger_seconds": 0.2}
    with serving(encoder=encoder, **limits) as served, raw.connect(served.port) as sock:
        sock.sendall(data)
        answer = last_word(sock)
    head, _, got = answer.partition(b"\r\n\r\n")
    assert head.startswith(start), head
    assert b"\r\nConnection: close\r\n" in head
    assert got.startswith(body) and bool(got) is bool(body)


def test_a_refusal_behind_another_answer_is_in_its_dialect_too() -> None:
    with serving(encoder=encoder) as served, raw.connect(served.port) as sock:
        sock.sendall(raw.request("GET", "/plain") + b"POST /detached HTTP/1.1\r\n\r\n")
        data = last_word(sock)
        assert data.index(b" 200 OK") < data.index(b" 400 Bad") and data.endswith(b'\r\n\r\n{"mine":400}')
