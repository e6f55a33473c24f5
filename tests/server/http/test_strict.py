"""What is a request and what is not, by bytes alone."""

from __future__ import annotations

import random
import time

import pytest
from llmcore.api.errors import RequestError
from llmcore_server.http import strict
from llmcore_server.http.access import Entry
from llmcore_server.http.strict import Bounds, Pool, RequestReader
from reading import CHUNKED, SMALL, head, read, refused

# --- what is read ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "kept"),
    [
        (b"TE, close", "close"),
        (b"keep-alive ,CLOSE", "close"),
        (b"Upgrade,\tKeep-Alive", "keep-alive"),
        (b"Upgrade, TE", ""),
        (b"Close", "Close"),
    ],
)
def test_a_wish_to_close_is_found_among_others(value: bytes, kept: str) -> None:
    reader = read(head(b"Connection: " + value, first=b"GET / HTTP/1.1"))
    assert reader.head is not None and reader.head.headers["CONNECTION"] == kept


@pytest.mark.parametrize("step", [None, 1, 2, 3, 7])
def test_a_request_with_a_body(step: int | None) -> None:
    data = head(b"X-Two:a", b"x-two: \tb \t", b"Content-Length: 5", b"X_Odd: y", first=b"POST /a%20b?c=%20d HTTP/1.1")
    reader = read(data + b"hello", step)
    assert reader.done and reader.error is None and bytes(reader.body) == b"hello"
    assert reader.head is not None
    assert (reader.head.method, reader.head.path, reader.head.query, reader.head.version) == (
        "POST",
        "/a b",
        "c=%20d",
        "1.1",
    )
    assert reader.head.headers == {"HOST": "x", "X_TWO": "a, b", "CONTENT_LENGTH": "5"}


@pytest.mark.parametrize("data", [head(), head(b"Content-Length: 0"), b"\r\n" + head(), head(b"X:")])
def test_a_request_without_one(data: bytes) -> None:
    for step in (None, 1):
        assert read(data, step).error is None
        reader = read(data, step)
        assert reader.done and reader.body == b""


@pytest.mark.parametrize("step", [None, 1, 2, 5])
def test_chunks_extensions_and_trailers(step: int | None) -> None:
    body = b"5;a=b;c\r\nhello\r\n0006 \r\n world\r\n0\r\nX-Sum: 1\r\n\r\n"
    reader = read(CHUNKED + body, step)
    assert reader.done and reader.error is None and bytes(reader.body) == b"hello world"
    assert reader.head is not None and "TRANSFER_ENCODING" not in reader.head.headers


def test_what_follows_a_request_is_left() -> None:
    for data in (head(), head(b"Content-Length: 2") + b"ab", CHUNKED + b"1\r\nx\r\n0\r\n\r\n"):
        reader = RequestReader(SMALL, Pool(100))
        assert reader.feed(data + b"GET / HT") == len(data)
        assert reader.done and reader.error is None


def test_pieces_make_no_difference() -> None:
    rng = random.Random(5)
    for _ in range(200):
        body = b"".join(
            b"%x%s\r\n%s\r\n" % (n, rng.choice((b"", b" ", b";q")), rng.randbytes(n))
            for n in (rng.randint(1, 30) for _ in range(rng.randint(0, 8)))
        )
        data = (
            CHUNKED
            + body
            + rng.choice((b"0\r\n\r\n", b"0\r\nA: b\r\n\r\n", b"0\r\nbroken\r\n\r\n", b"x\r\n", b"0\n\n"))
        )
        outcomes = []
        for _ in range(4):
            reader, rest = RequestReader(SMALL, Pool(1 << 20)), data
            while rest and not reader.done:
                n = rng.randint(1, 40)
                assert reader.feed(rest[:n]) <= n
                rest = rest[n:]
            outcomes.append((reader.error and reader.error.status, b"" if reader.error else bytes(reader.body)))
        assert len(set(outcomes)) == 1, data


def test_expect() -> None:
    def expects(*lines: bytes, first: bytes = b"POST / HTTP/1.1") -> bool:
        reader = read(head(*lines, first=first))
        assert reader.head is not None
        return reader.head.expects

    assert expects(b"Expect: 100-Continue", b"Content-Length: 1")
    assert not expects(b"Expect: 100-continue")
    assert not expects(b"Expect: 100-continue", b"Content-Length: 1", first=b"POST / HTTP/1.0")
    assert refused(head(b"Expect: a-miracle", b"Content-Length: 1")) == 417


# --- what is not -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lines", "status"),
    [
        ((b"Content-Length: 5", b"Transfer-Encoding: chunked"), 400),
        ((b"Transfer-Encoding: chunked", b"Content-Length: 0"), 400),
        ((b"Content-Length: 5", b"Content-Length: 5"), 400),
        ((b"Content-Length: 5, 5",), 400),
        ((b"Content-Length: +2",), 400),
        ((b"Content-Length: 0x2",), 400),
        ((b"Content-Length: -1",), 400),
        ((b"Content-Length: 1_0",), 400),
        ((b"Content-Length: \xb2",), 400),
        ((b"Content-Length: \xd9\xa1",), 400),
        ((b"Content-Length: 1 0",), 400),
        ((b"Content-Length: 1e1",), 400),
        ((b"Content-Length:",), 400),
        ((b"Content-Length: " + b"9" * 500,), 400),
        ((b"Content-Length: 1001",), 413),
        ((b"Transfer-Encoding: gzip, chunked",), 501),
        ((b"Transfer-Encoding: chunked, chunked",), 501),
        ((b"Transfer-Encoding: xchunked",), 501),
        ((b"Transfer-Encoding: \x0bchunked",), 400),
        ((b"Transfer-Encoding : chunked",), 400),
        ((b"Transfer-Encoding:",), 501),
        ((b"Transfer-Encoding: chunked", b"Transfer-Encoding: chunked"), 400),
        ((b"Authorization: Bearer a", b"Authorization: Bearer b"), 400),
        ((b"Content-Type: a/b", b"content-type: c/d"), 400),
        ((b"Host: y",), 400),
        ((b"X: a\x00b",), 400),
        ((b"X: a\rb",), 400),
        ((b"X: a\nY: b",), 400),
        ((b"X: a", b" folded"), 400),
        ((b" X: a",), 400),
        ((b"no colon",), 400),
        ((b": no name",), 400),
        ((b"X\xe9: a",), 400),
        ((b"X: " + b"y" * 3000,), 431),
        (tuple(b"X: y" for _ in range(30)), 431),
    ],
)
def test_headers_that_are_refused(lines: tuple[bytes, ...], status: int) -> None:
    assert refused(head(*lines)) == status


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"x\r\n", 400),
        (b"\r\n", 400),
        (b"-1\r\n", 400),
        (b"1_0\r\n" + b"x" * 16 + b"\r\n", 400),
        (b" 1\r\nx\r\n", 400),
        (b"\xd9\xa1\r\nx\r\n", 400),
        (b"+1\r\nx\r\n", 400),
        (b"0x1\r\nx\r\n", 400),
        (b"1\nx\n", 400),
        (b"1\r\nxy\r\n", 400),
        (b"1\r\nx\n\n", 400),
        (b"1\r\nx\ry", 400),
        (b"1;\x00\r\nx\r\n", 400),
        (b"1" * 17 + b"\r\n", 400),
        (b"1;" + b"x" * 200, 400),
        (b"0" * 200, 400),
        (b"3e9\r\n", 413),
        (b"3e8\r\n" + b"x" * 1000 + b"\r\n1\r\n", 413),
        (b"ffffffff\r\n", 413),
        (b"0\r\n" + b"X: " + b"y" * 300, 400),
        (b"0\r\n" + b"X: y\r\n" * 60, 400),
        (b"0\r\nno colon\r\n\r\n", 400),
        (b"0\r\nX: a\x00\r\n\r\n", 400),
    ],
)
def test_chunks_that_are_refused(body: bytes, status: int) -> None:
    assert refused(CHUNKED + body) == status


def test_three_million_chunks_of_a_byte_are_refused_early() -> None:  # row 5
    data = CHUNKED + b"1\r\nx\r\n" * 100_000
    reader = RequestReader(Bounds(), Pool(1 << 30))
    start = time.thread_time()
    while data and not reader.done:
        data = data[reader.feed(data[:65536]) :]
    assert reader.error is not None and reader.error.status == 400
    assert time.thread_time() - start < 0.5  # a hundredth of it
    assert len(data) > 500_000


def test_an_endless_line_is_refused_where_its_bound_is() -> None:  # row 4
    for begun, bound in ((b"1;", 1024), (b"0\r\nX: ", 8192)):
        reader = RequestReader(Bounds(), Pool(1 << 30))
        reader.feed(CHUNKED + begun)
        sent = 0
        while not reader.done:
            reader.feed(b"x" * 64)
            sent += 64
        assert reader.error is not None and reader.error.status == 400
        assert bound - 64 <= sent <= bound + 64


def test_a_header_that_comes_byte_by_byte_costs_little() -> None:
    data = head(b"X: " + b"y" * 30_000)
    start = time.thread_time()
    assert read(data, 1, Bounds()).error is None
    assert time.thread_time() - start < 1.0  # a thirtieth of it


def test_bodies_share_a_pool() -> None:
    pool = Pool(10)
    readers = [RequestReader(SMALL, pool, sender=sender) for sender in "abc"]
    for reader, size in zip(readers, (b"6", b"4", b"1"), strict=True):
        reader.feed(head(b"Content-Length: " + size) + b"x" * int(size))
    assert [reader.error and reader.error.status for reader in readers] == [None, None, 503]
    readers[0].release()
    readers[0].release()
    again = RequestReader(SMALL, pool, sender="c")
    again.feed(CHUNKED + b"6\r\nabcdef\r\n0\r\n\r\n")
    assert again.error is None and again.done
    broken = RequestReader(SMALL, pool, sender="a")
    broken.feed(CHUNKED + b"1\r\nx\r\n")
    assert broken.error is not None and broken.error.status == 503
    again.release()
    readers[1].release()
    assert pool._free == 10


def test_of_who_is_not_let_in_only_the_end_is_looked_for() -> None:
    refusal = RequestError("full", status=429)
    sized = head(b"Content-Length: 4") + b"body"

    def fed(data: bytes, pool: Pool) -> tuple[int, RequestReader]:
        reader = RequestReader(SMALL, pool, lambda asked: Entry(refusal if asked.method == "POST" else None))
        return reader.feed(data), reader

    for data, taken in ((sized + b"GET ", len(sized)), (sized, len(sized)), (sized[:-1], len(sized) - 1)):
        found, reader = fed(data, Pool(0))
        assert found == taken and reader.entry.error is refusal and reader.error is None and reader.body == b""
        assert reader.done is (len(data) >= len(sized))
    chunked, reader = fed(CHUNKED + b"1\r\nx\r\n0\r\n\r\nGET ", Pool(1))
    assert chunked == len(CHUNKED) + 11 and reader.entry.error is refusal and reader.done and reader.error is None
    reader = fed(CHUNKED + b"x\r\n", Pool(1))[1]
    assert reader.error is not None and reader.error.status == 400  # where it ends cannot be known
    reader = fed(sized.replace(b"POST", b"PUT"), Pool(4))[1]
    assert reader.entry.error is None and reader.body == b"body"


def test_a_whole_header_is_judged_as_its_beginnings_are() -> None:
    some = random.Random(5)
    broken = 0
    for _ in range(20_000):
        head = bytes(some.choices(b"\r\r\n\n\t\x00\x0b\x1f\x7f\x80\xff ab", k=some.randint(0, 5)))
        found = strict._BROKEN.search(head + b"\r\n\r\n") is not None
        assert strict._is_broken(head + b"\r\n\r\n") is found, head
        broken += found
    assert 1000 < broken < 19_000
