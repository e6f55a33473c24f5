"""A client for a thousand streams: HTTP/1.1 directly on asyncio's transports, one connection per request.

It does not read the text of an answer. It records the time and the number of tokens so far, which dialects send with
every event. No torch.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import orjson
from llmcore_server.openai_client import server_address

_LONGEST_HEAD = 1 << 16
_SHOWN = 300


@dataclass(frozen=True)
class Dialect:
    """One HTTP API: the body that asks for a stream of an exact length, and the member that counts tokens.

    `body(ids, text, output, model)`: `ids` is the prompt. `text` replaces it in an API that does not accept ids.
    """

    path: str
    body: Callable[[Sequence[int], str, int, str], dict[str, Any]]
    counter: bytes


def _openai(output: int, model: str) -> dict[str, Any]:
    return {
        "model": model,
        "max_tokens": output,
        "temperature": 0.0,
        "ignore_eos": True,
        "skip_special_tokens": False,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }


DIALECTS: Mapping[str, Dialect] = {
    "openai-completions": Dialect(
        "/v1/completions",
        lambda ids, text, output, model: {**_openai(output, model), "prompt": ids},
        b'"completion_tokens":',
    ),
    "openai-chat": Dialect(
        "/v1/chat/completions",
        lambda ids, text, output, model: {
            **_openai(output, model),
            "messages": [{"role": "user", "content": text}],
        },
        b'"completion_tokens":',
    ),
    "lightllm": Dialect(
        "/generate_stream",
        lambda ids, text, output, model: {
            "inputs": ids,
            "parameters": {"max_new_tokens": output, "ignore_eos": True, "do_sample": False},
        },
        b'"count_output_tokens":',
    ),
}


@dataclass(frozen=True)
class Target:
    """A server's address. Raises ConfigError for an invalid one."""

    url: str
    dialect: Dialect
    host: str = field(init=False)
    port: int = field(init=False)
    tls: ssl.SSLContext | None = field(init=False)

    def __post_init__(self) -> None:
        secure, host, port = server_address(self.url)
        object.__setattr__(self, "host", host)
        object.__setattr__(self, "port", port)
        object.__setattr__(self, "tls", ssl.create_default_context() if secure else None)

    def request(self, ids: Sequence[int], text: str, output: int, model: str) -> bytes:
        """The bytes of one request."""
        body = orjson.dumps(self.dialect.body(ids, text, output, model))
        prefix = urlsplit(self.url).path.rstrip("/").removesuffix("/v1")
        head = (
            f"POST {prefix}{self.dialect.path} HTTP/1.1\r\nHost: {self.host}:{self.port}\r\nConnection: close\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        return head.encode("ascii") + body


@dataclass
class Answer:
    """The result of one request. Times are time.perf_counter()'s.

    `arrivals`: (time, tokens so far). `error`: why the request failed. Without an error, `ended` 0 means that the
    client gave the request up.
    """

    prompt: int
    output: int
    sent: float = 0.0
    ended: float = 0.0
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    error: str | None = None

    @property
    def tokens(self) -> int:
        """Tokens that have arrived."""
        return self.arrivals[-1][1] if self.arrivals else 0


async def ask(target: Target, request: bytes, answer: Answer) -> None:
    """Send a request and follow its stream to the end. `answer` gets the result, even of a failure."""
    loop = asyncio.get_running_loop()
    over: asyncio.Future[None] = loop.create_future()
    answer.sent = time.perf_counter()
    stream = Stream(target.dialect.counter, answer, over, request)
    transport: asyncio.BaseTransport | None = None
    try:
        transport, _ = await loop.create_connection(lambda: stream, target.host, target.port, ssl=target.tls)
        await over
    except OSError as error:
        answer.error = f"no connection: {error}"
    finally:
        if transport is not None:
            transport.close()
    answer.ended = time.perf_counter()
    if answer.error is None and answer.tokens != answer.output:
        answer.error = f"{answer.tokens} tokens came instead of {answer.output}"


class Stream(asyncio.Protocol):
    """One request on its own connection, and its answer as it arrives in pieces of any size."""

    def __init__(self, counter: bytes, answer: Answer, over: asyncio.Future[None], request: bytes) -> None:
        self._counter = counter
        self._answer = answer
        self._over = over
        self._request = request
        self._raw = bytearray()
        self._text = b""
        self._status = 0
        self._chunked = False
        self._left = 0
        self._ends = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the request."""
        assert isinstance(transport, asyncio.WriteTransport)
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        """Count the tokens that have arrived."""
        now = time.perf_counter()
        self._raw += data
        if not self._status and not self._read_head():
            return
        if self._chunked:
            self._read_chunks()
        else:
            self._text += bytes(self._raw)
            self._raw.clear()
        if self._status == 200:
            self._count(now)
        if self._ends:
            self._end()

    def connection_lost(self, error: Exception | None) -> None:
        """End the answer. The count of tokens shows whether the connection closed too early."""
        if error is not None and self._answer.error is None:
            self._answer.error = f"the connection broke: {error}"
        self._end()

    def _read_head(self) -> bool:
        head, blank, rest = self._raw.partition(b"\r\n\r\n")
        if not blank:
            if len(self._raw) > _LONGEST_HEAD:
                self._answer.error = "this is no HTTP"
                self._end()
            return False
        first, _, headers = bytes(head).lower().partition(b"\r\n")
        words = first.split()
        if len(words) < 2 or not words[1].isdigit():
            self._answer.error = f"this is no HTTP: {first[:_SHOWN]!r}"
            self._end()
            return False
        self._status = int(words[1])
        self._chunked = b"transfer-encoding: chunked" in headers
        self._raw = bytearray(rest)
        return True

    def _read_chunks(self) -> None:
        raw, at = self._raw, 0
        while True:
            if self._left:
                piece = bytes(raw[at : at + self._left])
                if not piece:
                    break
                self._text += piece
                self._left -= len(piece)
                at += len(piece)
                continue
            end = raw.find(b"\r\n", at)
            if end < 0:
                break
            size = bytes(raw[at:end]).partition(b";")[0].strip()
            at = end + 2
            if size:  # an empty line is the line end after a chunk
                self._left = int(size, 16)
                self._ends = self._ends or self._left == 0
        del raw[:at]

    def _count(self, now: float) -> None:
        end = self._text.rfind(b"\n\n") + 2
        if end < 2:
            return
        events, self._text = self._text[:end], self._text[end:]
        tokens = number_after(self._counter, events)
        if tokens > self._answer.tokens:
            self._answer.arrivals.append((now, tokens))
        elif (at := events.find(b'"message"')) >= 0:
            self._answer.error = f"the stream ended: {_shown(events[at:])}"

    def _end(self) -> None:
        if self._status not in (0, 200):
            self._answer.error = f"{self._status}: {_shown(self._text)}"
        if not self._over.done():
            self._over.set_result(None)


def number_after(name: bytes, text: bytes) -> int:
    """The whole number after the last `name`, or 0 if there is none."""
    at = text.rfind(name)
    if at < 0:
        return 0
    digits = text[at + len(name) : at + len(name) + 12].lstrip()
    end = next((i for i, byte in enumerate(digits) if not 48 <= byte <= 57), len(digits))
    return int(digits[:end] or 0)


def _shown(text: bytes) -> str:
    return text[:_SHOWN].decode("utf-8", "replace").strip()
