"""A dialect that fails on an answer, wherever it does: its client hears of it, and the request ends once."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import falcon
import pytest
from llmcore.api.bridge import Prompt, Submit
from llmcore.api.errors import RequestError
from llmcore.text.stream import TextRules
from llmcore.text.tokenizer import load_tokenizer
from llmcore_devtools import sockets as raw
from llmcore_devtools.dialect import FakeBridge, FakeTransport, fake_front
from llmcore_devtools.tokenizer import write_tokenizer
from llmcore_server.http.access import ANYBODY, Entry
from llmcore_server.http.errors import EncodeError, openai_error
from llmcore_server.http.generation import Generation, Request
from llmcore_server.http.reply import Reply
from llmcore_server.http.streaming.server import HttpServer
from llmcore_server.http.strict import Bounds, Head
from served import last_word, serving


class Panic(BaseException):
    """What a native library's panic is in Python: no Exception."""


class Writer:
    """Raises in the calls named in `broken`; the first `write` begins a stream where that is wanted."""

    def __init__(self, reply: Reply, broken: set[str], *, stream: bool) -> None:
        self.reply, self.broken, self.stream = reply, broken, stream

    def _at(self, place: str) -> None:
        if place in self.broken:
            raise Panic(f"told to panic in {place}")

    def write(self, *given: object) -> None:
        if self.stream:
            self.reply.stream(b"data: 1\n\n")
        self._at("write")

    def done(self) -> None:
        self._at("done")
        self.reply.respond(200, b"{}")

    def failed(self, error: RequestError) -> None:
        self._at("failed")
        if self.stream:
            self.reply.stream(b"data: " + openai_error(error) + b"\n\n")
            self.reply.end()
        else:
            self.reply.respond(error.status, openai_error(error))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("broken", [{"write"}, {"done"}, {"write", "failed"}, {"done", "failed"}])
def test_the_client_hears_of_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, broken: set[str], stream: bool
) -> None:
    bridge = FakeBridge(wait=True)
    front = fake_front(bridge, load_tokenizer(write_tokenizer(tmp_path)))
    transport = FakeTransport(falcon.Response())
    reply = Reply(transport)
    reply.attach()
    submit = Submit(id=front.next_id(), prompt=Prompt.of([0] * 2), max_new_tokens=3)
    request = Request(submits=[submit], rules=TextRules(), dialect="x", request_id="r-17")
    with caplog.at_level(logging.ERROR):
        Generation(front, reply, request).start(Writer(reply, broken, stream=stream))
        for _ in range(4):
            bridge.step()
    assert transport.ended
    last = transport.sent.strip().rpartition(b"data: ")[2] if stream else transport.sent
    assert json.loads(last)["error"]["code"] == "internal_error"
    assert transport.status == (200 if stream else 500)
    assert [(record.request_id, record.finish, record.cause) for record in front.records] == [
        ("r-17", "error", "failure")
    ]
    assert not bridge._open, "the engine goes on with it"
    assert [record.getMessage() for record in caplog.records] == [
        "request r-17 failed on the way to its client"
    ] * len(broken)
    assert b"told to panic" not in transport.sent


@pytest.mark.parametrize(
    "answer",
    [(200, "{}"), (200, None), ("200", b"{}"), (7, b"{}"), (None, b"{}"), (200, b"{}", None), (200, b"{}", 5)],
)
@pytest.mark.parametrize("detached", [True, False])
def test_an_answer_that_is_none_is_an_error_and_nobody_waits(answer: tuple[Any, ...], detached: bool) -> None:
    """Whether or not the responder still runs: nothing of it has gone out then."""
    transport = FakeTransport(falcon.Response())
    reply = Reply(transport)
    if detached:
        reply.attach()
    with pytest.raises(TypeError, match="an answer is a status, bytes and a media type"):
        reply.respond(*answer)
    with pytest.raises(TypeError, match="a piece of a stream is bytes"):
        reply.stream(answer[0])
    reply.respond(500, b"right")
    reply.attach()
    assert (transport.ended, transport.status, transport.sent) == (True, 500, b"right")


def broken_encoder(path: str) -> EncodeError:
    """Of a dialect that cannot even write errors."""

    def encode(error: RequestError) -> bytes:
        raise Panic("told to panic in encode")

    return encode if path == "/detached" else openai_error


@pytest.mark.parametrize(
    ("begun", "status"),
    [
        (b"POST /detached HTTP/1.1\r\nHost: x\r\nContent-Length: 67108864\r\n\r\n", 413),  # while it is read
        (b"POST /detached HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\nx", 408),  # when its time is over
    ],
)
def test_the_main_loop_outlives_a_dialect_that_cannot_write_errors(
    begun: bytes, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    limits = {"body_seconds": 0.2, "bounds": Bounds(body=1 << 20)}
    with serving(encoder=broken_encoder, **limits) as served, raw.connect(served.port) as sock:
        sock.sendall(begun)
        found, _, body = raw.read_reply(sock)
        assert found == status and json.loads(body)["error"]["message"]
        assert b"told to panic" not in body
        with raw.connect(served.port) as other:
            other.sendall(raw.request("GET", "/plain"))
            assert raw.read_reply(other)[2] == b"plain"
    assert [record.getMessage() for record in caplog.records] == ["a dialect could not write an error"]


def test_a_connection_that_panics_ends_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def judge(self: HttpServer, head: Head) -> Entry:
        if head.path == "/panics":
            raise Panic("told to panic")
        return ANYBODY

    monkeypatch.setattr(HttpServer, "judge", judge)
    with serving() as served, raw.connect(served.port) as sock:
        sock.sendall(raw.request("GET", "/panics"))
        assert last_word(sock) == b""
        with raw.connect(served.port) as other:
            other.sendall(raw.request("GET", "/plain"))
            assert raw.read_reply(other)[2] == b"plain"
    assert [record.getMessage() for record in caplog.records] == ["a connection failed"]
