from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager

import pytest
from llmcore.api.errors import RequestError
from llmcore_devtools import sockets as raw
from llmcore_server.http.streaming.channel import StreamChannel
from llmcore_server.http.streaming.loop import MOST, SendBatch
from served import PATIENCE, POST, Served, last_word, serving, until


def test_pieces_are_kept_until_there_are_enough_or_it_closes() -> None:
    send_batch, sent = SendBatch(), list[bytes]()
    send_batch.post(sent.append, b"at once")
    assert sent == [b"at once"]
    with send_batch:
        for i in range(MOST - 1):
            send_batch.post(sent.append, b"%d" % i)
        assert sent == [b"at once"]
        send_batch.post(sent.append, b"enough")
        assert sent == [b"at once", *(b"%d" % i for i in range(MOST - 1)), b"enough"]
        send_batch.post(sent.append, b"last")
        assert sent[-1] == b"enough"
    assert sent[-1] == b"last" and len(sent) == MOST + 2
    send_batch.post(sent.append, b"closed")
    assert sent[-1] == b"closed"


def test_pieces_are_sent_where_an_event_failed() -> None:
    send_batch, sent = SendBatch(), list[bytes]()
    with pytest.raises(ZeroDivisionError), send_batch:
        send_batch.post(sent.append, b"before")
        raise ZeroDivisionError
    assert sent == [b"before"]


def test_nothing_is_lost_or_overtaken_where_threads_post_and_flush() -> None:
    send_batch = SendBatch()
    got: list[list[bytes]] = [[] for _ in range(4)]

    def opened() -> None:
        for i in range(500):
            with send_batch:
                send_batch.post(got[0].append, b"%d" % i)

    def posting(mine: list[bytes]) -> None:
        for i in range(500):
            send_batch.post(mine.append, b"%d" % i)
            if not i % 7:
                send_batch.flush()

    threads = [threading.Thread(target=opened), *(threading.Thread(target=posting, args=(g,)) for g in got[1:])]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert got == [[b"%d" % i for i in range(500)]] * 4


@contextmanager
def streams(n: int) -> Iterator[tuple[Served, list[socket.socket]]]:
    """A server with so many replies, each let go by its thread, and their clients."""
    with serving() as served, ExitStack() as stack:
        socks = [stack.enter_context(raw.connect(served.port)) for _ in range(n)]
        for i, sock in enumerate(socks):
            sock.sendall(POST)
            reply = served.detached.wait(i + 1)[i]
            until(lambda reply=reply: reply._early is None)
        yield served, socks


def test_the_end_of_a_stream_does_not_overtake_its_pieces() -> None:
    with streams(2) as (served, socks):
        one, two = served.detached.replies
        with served.server.send_batch:
            for reply in (one, two):
                reply.stream(b"data: 1\n\n")
            one.probe()
            one.stream(b"data: 2\n\n")
            one.end()
        two.end()
        heads, bodies = zip(*(last_word(sock).split(b"\r\n\r\n", 1) for sock in socks), strict=True)
    assert all(head.startswith(b"HTTP/1.1 200 OK\r\n") for head in heads)
    chunk = b"9\r\ndata: %d\n\n\r\n"
    assert bodies == (chunk % 1 + b"3\r\n:\n\n\r\n" + chunk % 2 + b"0\r\n\r\n", chunk % 1 + b"0\r\n\r\n")


def test_a_piece_that_cannot_be_sent_ends_its_own_stream_only(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    push = StreamChannel.push

    def failing(self: StreamChannel, data: bytes, allowance: float = 0.0) -> None:
        if b"bad" in data:
            raise MemoryError
        push(self, data, allowance)

    monkeypatch.setattr(StreamChannel, "push", failing)
    with streams(3) as (served, socks):
        good, bad, other = served.detached.replies
        with served.server.send_batch:
            good.stream(b"data: 1\n\n")
            bad.stream(b"bad")
            other.stream(b"data: 3\n\n")
        until(lambda: served.detached.left)
        assert served.detached.left == [bad] and bad.why_closed == "failure"
        for reply in (good, other):
            reply.end()
        words = [last_word(sock) for sock in socks]
    assert b"data: 1\n\n" in words[0] and not words[1] and b"data: 3\n\n" in words[2]
    assert "an answer is lost" in caplog.text


def test_an_answer_does_not_overtake_the_refusal_of_the_request_before_it() -> None:
    def admit(method: str, path: str, headers: Mapping[str, str]) -> RequestError | None:
        return RequestError("full", status=429) if path == "/detached" else None

    expects = raw.request("POST", "/plain", headers="Content-Length: 2\r\nExpect: 100-continue\r\n")
    for following, word in ((raw.request("GET", "/plain"), b"HTTP/1.1 200 OK"), (expects, b"HTTP/1.1 100 Continue")):
        with serving(admit=admit) as served, raw.connect(served.port) as sock:
            server, heard = served.server._server, threading.Event()
            add = server.add_task

            def add_and_wait(
                task: object, add: Callable[[object], None] = add, heard: threading.Event = heard
            ) -> None:
                add(task)
                heard.wait(PATIENCE)  # the main loop goes on when the client has heard something

            server.add_task = add_and_wait
            sock.sendall(POST + following)
            words = raw.read_until(sock, b"HTTP/1.1")
            heard.set()
            words = raw.read_until(sock, word, data=words)
        assert b"HTTP/1.1 429" in words[: words.index(word)]


def test_one_that_closes_sends_for_all() -> None:
    send_batch, sent = SendBatch(), list[bytes]()
    with send_batch:
        with send_batch:
            send_batch.post(sent.append, b"1")
        assert sent == [b"1"]
        send_batch.post(sent.append, b"2")
        assert sent == [b"1"]
    assert sent == [b"1", b"2"]
