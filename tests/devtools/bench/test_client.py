"""The client counts what a server sends, in whatever pieces it comes."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator

import pytest
from llmcore_devtools.bench.client import DIALECTS, Answer, Stream, Target, number_after
from llmcore_devtools.bench.load import latencies, offer, payloads
from llmcore_devtools.server import FAKE_ENGINE, RunningServer, serving
from llmcore_devtools.tokenizer import write_tokenizer


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """Echoes prompts; its ids end at 999."""
    model = write_tokenizer(tmp_path_factory.mktemp("models") / "echo")
    with serving(model, engine_module=FAKE_ENGINE) as running:
        yield running


STREAM = (
    b'data: {"choices":[{"text":"a"}],"usage":{"prompt_tokens":9,"completion_tokens":1}}\n\n'
    b'data: {"choices":[{"text":"\\"completion_tokens\\":77"}],"usage":{"completion_tokens": 12,"x":1}}\n\n'
    b"data: [DONE]\n\n"
)


def follow(data: bytes, size: int) -> Answer:
    """What a Stream makes of `data` when it comes in pieces of `size` bytes."""

    async def feed() -> Answer:
        found = Answer(1, 12)
        over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        stream = Stream(b'"completion_tokens":', found, over, b"")
        for at in range(0, len(data), size):
            stream.data_received(data[at : at + size])
        stream.connection_lost(None)
        assert over.done()
        return found

    return asyncio.run(feed())


@pytest.mark.parametrize("size", [1, 2, 7, 64, 10_000])
@pytest.mark.parametrize("chunked", [True, False])
def test_any_pieces_give_the_same_counts(size: int, chunked: bool) -> None:
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
    body = STREAM
    if chunked:
        head += b"Transfer-Encoding: chunked\r\n"
        pieces = [STREAM[at : at + 50] for at in range(0, len(STREAM), 50)]
        body = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"
    found = follow(head + b"\r\n" + body, size)
    assert found.error is None and found.tokens == 12
    assert [tokens for _, tokens in found.arrivals] == ([12] if size == 10_000 else [1, 12])


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b'HTTP/1.1 400 Bad Request\r\n\r\n{"error":{"message":"no such id"}}', "400: .*no such id"),
        (b'HTTP/1.1 200 OK\r\n\r\ndata: {"error":{"message":"engine gone"}}\n\n', "the stream ended: .*engine gone"),
        (b"SSH-2.0-OpenSSH\r\n\r\n", "this is no HTTP"),
    ],
)
def test_what_a_server_says_is_kept(data: bytes, message: str) -> None:
    for size in (1, 1000):
        assert re.match(message, follow(data, size).error or "", re.DOTALL)


def test_numbers_in_events() -> None:
    assert number_after(b'"n":', b'{"n":1}{"n": 23,') == 23
    assert number_after(b'"n":', b'{"n":null}') == 0
    assert number_after(b'"n":', b'{"m":4}') == 0


@pytest.mark.parametrize("dialect", DIALECTS)
def test_every_token_of_a_real_server_is_counted(dialect: str, server: RunningServer) -> None:
    target = Target(server.url, DIALECTS[dialect])
    lengths = [(20, 6), (9, 1), (14, 11)] * 4
    window = offer(target, payloads(target, lengths, 250, "echo"), lengths, 200.0, seconds=60, seed=1)
    assert [answer.error for answer in window.answers] == [None] * 12
    assert [answer.tokens for answer in window.answers] == [output for _, output in lengths]
    for one in window.answers:
        assert one.sent < one.arrivals[0][0] <= one.arrivals[-1][0] <= one.ended
    # a step of this engine takes 5 ms and gives one token; some first ones may come late, and so too near
    paces = [found["tpot"] for one in window.answers if (found := latencies(one))["tpot"] is not None]
    assert len(paces) == 8 and max(paces) > 4


def test_nobody_there() -> None:
    target = Target("http://127.0.0.1:9", DIALECTS["lightllm"])
    window = offer(target, payloads(target, [(4, 4)], 99, ""), [(4, 4)], float("inf"), seconds=5, seed=1)
    assert (window.answers[0].error or "").startswith("no connection")
