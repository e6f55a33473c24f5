"""Answers that are made while they are sent."""

from __future__ import annotations

import gc
import json
import socket
import time
import weakref
from array import array
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import orjson
import pytest
from llmcore_devtools import sockets as raw
from llmcore_server.http.pieces import PIECE, Listed, listed, pieces
from served import POST, serving, until

WHOLE = 24 << 20
"""More than the buffers of two sockets on one machine take."""


class Source(Iterator[bytes]):
    """Pieces of an answer; counts those that were made."""

    def __init__(self, count: int, size: int = PIECE, fail_at: int = -1) -> None:
        self.made, self.count, self.size, self.fail_at = 0, count, size, fail_at

    def __next__(self) -> bytes:
        if self.made == self.count:
            raise StopIteration
        if self.made == self.fail_at:
            raise ValueError("this piece cannot be made")
        self.made += 1
        return b"%c" % (self.made % 256) * self.size

    @property
    def all(self) -> bytes:
        return b"".join(b"%c" % (i % 256) * self.size for i in range(1, self.count + 1))


def everything(sock: socket.socket) -> bytes:
    data = []
    while more := sock.recv(1 << 20):
        data.append(more)
    return b"".join(data)


# --- what they are made of -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nested", [False, True])
def test_an_answer_in_pieces_is_the_answer(nested: bool) -> None:
    numbers, texts = list(range(30_000)), [f"t\u00e9xt {i}" for i in range(20_000)]
    plain: dict[str, Any] = {
        "a": 1,
        "numbers": numbers,
        "none": None,
        "texts": texts,
        "empty": [],
        "long": "x" * 3 * PIECE,
    }
    late = {**plain, "numbers": array("i", numbers), "texts": listed(texts), "empty": listed(())}
    whole: Any = {"one": [plain, {"b": plain}], "two": {}} if nested else plain
    made: Any = {"one": [late, {"b": {**plain, "texts": listed(texts)}}], "two": {}} if nested else late
    parts = list(pieces(made))
    assert b"".join(parts) == orjson.dumps(whole)
    assert {len(part) for part in parts[:-1]} == {PIECE} and 0 < len(parts[-1]) <= PIECE


def test_arrays_that_are_empty() -> None:
    assert b"".join(pieces([Listed(()), array("i"), {}])) == b"[[],[],{}]"


# --- how they are sent -----------------------------------------------------------------------------------------------


def test_a_short_answer_has_its_length_and_keeps_the_connection() -> None:
    with serving() as served, raw.connect(served.port) as sock:
        for i in range(1, 3):
            sock.sendall(POST)
            served.detached.wait(i)[-1].respond_in_pieces(iter([b"[1]"]), headers={"X-More": "yes"})
            status, headers, body = raw.read_reply(sock)
            assert (status, body, headers["content-length"], headers["x-more"]) == (200, b"[1]", "3", "yes")
            assert headers["content-type"] == "application/json" and "connection" not in headers


@pytest.mark.parametrize("version", ["1.0", "1.1"])
def test_a_long_answer_comes_whole_and_its_end_is_seen(version: str) -> None:
    source = Source(100)
    with serving() as served, raw.connect(served.port) as sock:
        sock.sendall(raw.request("POST", "/detached", {}, version=version, headers="Connection: keep-alive\r\n"))
        served.detached.wait(1)[0].respond_in_pieces(source, headers={"X-More": "yes"})
        status, headers, body = raw.read_head(sock)
        body += everything(sock)
        assert (status, headers["connection"], headers["x-more"]) == (200, "close", "yes")
        assert "content-length" not in headers
        assert (headers.get("transfer-encoding") == "chunked") == (version == "1.1")
        assert (raw.unchunk(body) if version == "1.1" else body) == source.all
        until(lambda: not served.server._channels())


def test_no_more_is_made_than_the_client_takes() -> None:
    source = Source(WHOLE // PIECE)
    with serving() as served, raw.connect(served.port) as sock:
        sock.sendall(POST)
        served.detached.wait(1)[0].respond_in_pieces(source)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
        made = -1
        while made != source.made:
            made = source.made
            time.sleep(0.5)
        assert 2 <= made * PIECE <= WHOLE // 2
        (channel,) = served.server._channels()
        assert channel.total_outbufs_len <= 2 * PIECE
        assert raw.unchunk(raw.read_head(sock)[2] + everything(sock)) == source.all


def test_others_are_served_between_two_pieces() -> None:
    class Slow(Source):
        def __next__(self) -> bytes:
            time.sleep(0.01)
            return super().__next__()

    sources = [Slow(1000) for _ in range(3)]
    with serving() as served, raw.connect(served.port) as one, raw.connect(served.port) as two:
        for i, sock in enumerate((one, two)):
            sock.sendall(POST)
            served.detached.wait(i + 1)[i].respond_in_pieces(sources[i])
            sock.settimeout(0.0)
        for _ in range(20):
            for sock in (one, two):
                with suppress(BlockingIOError):
                    sock.recv(1 << 20)
            before = max(source.made for source in sources)
            assert raw.call(served.port, "GET", "/plain")[2] == b"plain"
            assert max(source.made for source in sources) - before < 50


def test_a_reader_that_is_slower_than_the_least_rate_is_cut_off_however_it_reads() -> None:
    source = Source(WHOLE // PIECE)
    with serving(backlog_seconds=0.5, rate=64 << 20) as served, raw.connect(served.port) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
        sock.sendall(POST)
        served.detached.wait(1)[0].respond_in_pieces(source)
        with pytest.raises(ConnectionError):
            while sock.recv(1 << 17):
                time.sleep(0.1)
        until(lambda: not served.server._channels())
        assert source.made < source.count


def test_a_reader_that_is_slow_but_keeps_the_rate_gets_all() -> None:
    source = Source(200)
    with serving(backlog_seconds=0.5, rate=1 << 20) as served, raw.connect(served.port) as sock:
        sock.sendall(POST)
        served.detached.wait(1)[0].respond_in_pieces(source)
        time.sleep(0.8)
        assert raw.unchunk(raw.read_head(sock)[2] + everything(sock)) == source.all


@pytest.mark.parametrize("half_first", [False, True])
def test_a_client_that_leaves_frees_the_answer(half_first: bool) -> None:
    source = Source(WHOLE // PIECE)
    seen = weakref.ref(source)
    with serving() as served:
        with raw.connect(served.port) as sock:
            sock.sendall(POST)
            served.detached.wait(1)[0].respond_in_pieces(source)
            raw.read_head(sock)
            if half_first:
                sock.shutdown(socket.SHUT_WR)
        until(lambda: not served.server._channels())
        assert source.made < source.count
        del source
        served.detached.replies.clear()
        until(lambda: (gc.collect(), seen() is None)[1])


@pytest.mark.parametrize("version", ["1.0", "1.1"])
def test_an_answer_that_cannot_go_on_does_not_look_complete(version: str) -> None:
    with serving() as served, raw.connect(served.port) as sock:
        sock.sendall(raw.request("POST", "/detached", {}, version=version))
        served.detached.wait(1)[0].respond_in_pieces(Source(100, fail_at=50))
        with pytest.raises(ConnectionError):
            everything(sock)
        assert raw.call(served.port, "GET", "/plain")[2] == b"plain"


def test_an_answer_that_cannot_begin_may_still_be_another() -> None:
    with serving() as served, raw.connect(served.port) as sock:
        sock.sendall(POST)
        (reply,) = served.detached.wait(1)
        with pytest.raises(ValueError, match="cannot be made"):
            reply.respond_in_pieces(Source(100, fail_at=1))
        reply.respond(500, b"{}")
        assert raw.read_reply(sock)[0] == 500


def test_a_server_that_ends_sends_the_rest_first() -> None:
    source = Source(WHOLE // PIECE)
    with serving() as served, raw.connect(served.port) as sock:
        sock.sendall(POST)
        served.detached.wait(1)[0].respond_in_pieces(source)
        data = sock.recv(1000)
        served.server.stop(30.0)
        assert raw.unchunk((data + everything(sock)).partition(b"\r\n\r\n")[2]) == source.all


def test_requests_behind_it_are_not_answered() -> None:
    source = Source(100)
    with serving() as served, raw.connect(served.port) as sock:
        sock.sendall(POST + POST)
        served.detached.wait(1)[0].respond_in_pieces(source)
        assert raw.unchunk(raw.read_head(sock)[2] + everything(sock)) == source.all
        assert len(served.detached.replies) == 1


def test_json_of_a_whole_answer_is_read_by_a_plain_client() -> None:
    entries = [{"token": "x", "logprob": -0.5} for _ in range(20_000)]
    with serving() as served, raw.connect(served.port) as sock:
        sock.sendall(POST)
        served.detached.wait(1)[0].respond_in_pieces(pieces({"content": listed(entries)}))
        assert json.loads(raw.read_reply(sock)[2]) == {"content": entries}
