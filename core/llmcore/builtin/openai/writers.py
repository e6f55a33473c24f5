"""Answers as OpenAI sends them, whole or as a stream of chunks; chat and text completions differ only in a `Shape`."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Any, Protocol

import orjson

from llmcore.api import ChoiceEvent, Finish, RequestError
from llmcore.api.http import Choice, Front, Generation, openai_error
from llmcore.api.text import Event
from llmcore.builtin.openai.logprobs import Pending
from llmcore.builtin.openai.requests import StreamOptions

Shown = list[tuple[int, int, float, tuple[tuple[int, float], ...]]]

_DONE = b"data: [DONE]\n\n"


class Shape(Protocol):
    """What chat and text completions do not have in common."""

    id_prefix: str
    object: str
    chunk_object: str

    def opening(self, choice: Choice) -> bytes | None:
        """The members of the first chunk of a choice, if it has one of its own."""

    def pieces(self, choice: Choice, text: str) -> Sequence[bytes]:
        """The members of the chunks that hold what is new: `text`, or what parsers made of it."""

    def logprobs(self, choice: Choice, shown: Shown) -> Any:
        """The logprobs of some tokens."""

    def whole(self, choice: Choice, text: str, events: Sequence[Event]) -> dict[str, Any]:
        """The members of a whole choice that hold its text, or what parsers made of it."""

    def finish_reason(self, choice: Choice) -> str:
        """Why a choice ended."""

    closing: bytes
    """The members of a choice's last chunk."""


class Envelope:
    """What every chunk of one answer, or the answer itself, repeats."""

    def __init__(self, front: Front, generation: Generation, shape: Shape):
        self.id = f"{shape.id_prefix}-{uuid.uuid4().hex}"
        self.created = int(time.time())
        self.model = front.model_name
        self._generation = generation

    def members(self, kind: str) -> dict[str, Any]:
        """id, object, created, model."""
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def usage(self) -> dict[str, Any]:
        """Tokens so far."""
        usage = self._generation.usage()
        members: dict[str, Any] = {
            "prompt_tokens": usage.prompt,
            "completion_tokens": usage.output,
            "total_tokens": usage.prompt + usage.output,
            "prompt_tokens_details": {"cached_tokens": usage.cached},
        }
        if usage.reasoning is not None:
            members["completion_tokens_details"] = {"reasoning_tokens": usage.reasoning}
        return members


class WholeWriter:
    """Collects every choice and answers once."""

    def __init__(self, front: Front, generation: Generation, shape: Shape, *, logprobs: bool):
        self._generation = generation
        self._shape = shape
        self._envelope = Envelope(front, generation, shape)
        self._texts: list[list[str]] = [[] for _ in generation.choices]
        self._events: list[list[Event]] = [[] for _ in generation.choices]
        self._shown: list[Shown] = [[] for _ in generation.choices]
        self._pending = [Pending() for _ in generation.choices] if logprobs else None

    def write(self, choice: Choice, event: ChoiceEvent, texts: list[str]) -> None:
        """Collect."""
        self._texts[choice.index] += texts
        self._events[choice.index] += choice.events or ()
        if self._pending is not None:
            self._shown[choice.index] += self._pending[choice.index].take(choice, event)

    def done(self) -> None:
        """Answer."""
        answer = self._envelope.members(self._shape.object)
        answer["choices"] = [self._choice(choice) for choice in self._generation.choices]
        answer["usage"] = self._envelope.usage()
        self._generation.reply.respond(200, orjson.dumps(answer))

    def failed(self, error: RequestError) -> None:
        """Answer with the error."""
        respond_error(self._generation, error)

    def _choice(self, choice: Choice) -> dict[str, Any]:
        shown = None if self._pending is None else self._shape.logprobs(choice, self._shown[choice.index])
        return {
            "index": choice.index,
            **self._shape.whole(choice, "".join(self._texts[choice.index]), self._events[choice.index]),
            "logprobs": shown,
            "finish_reason": self._shape.finish_reason(choice),
        }


class StreamWriter:
    """Sends chunks as text is released: per choice an opening, pieces, and a closing with the finish reason."""

    def __init__(
        self, front: Front, generation: Generation, shape: Shape, *, logprobs: bool, options: StreamOptions | None
    ):
        self._reply = generation.reply
        self._generation = generation
        self._shape = shape
        self._envelope = Envelope(front, generation, shape)
        head = orjson.dumps(self._envelope.members(shape.chunk_object))[:-1]
        self._heads = [b'data: %b,"choices":[{"index":%d,' % (head, choice.index) for choice in generation.choices]
        self._opened = [False for _ in generation.choices]
        self._pending = [Pending() for _ in generation.choices] if logprobs else None
        self._include_usage = bool(options and options.include_usage)
        self._running_usage = self._include_usage and bool(options and options.continuous_usage_stats)
        self._streaming = False

    def write(self, choice: Choice, event: ChoiceEvent, texts: list[str]) -> None:
        """Send what `texts` and the choice's end come to."""
        out: list[bytes] = []
        if not self._opened[choice.index]:
            self._opened[choice.index] = True
            opening = self._shape.opening(choice)
            if opening is not None:
                out.append(self._chunk(choice, opening))
        shown = None if self._pending is None else self._pending[choice.index].take(choice, event)
        pieces = self._shape.pieces(choice, "".join(texts))
        logprobs = b"null" if shown is None else orjson.dumps(self._shape.logprobs(choice, shown))
        for members in pieces or ((self._shape.closing,) if shown else ()):
            out.append(self._chunk(choice, members, logprobs))
            logprobs = b"null"
        if choice.text.finish is not Finish.RUNNING:
            reason = b'"%b"' % self._shape.finish_reason(choice).encode()
            out.append(self._chunk(choice, self._shape.closing, finish=reason))
        if out:
            self._send(out)

    def done(self) -> None:
        """End the stream."""
        out = [_DONE]
        if self._include_usage:
            members = self._envelope.members(self._shape.chunk_object)
            out.insert(0, b"data: %b\n\n" % orjson.dumps({**members, "choices": [], "usage": self._envelope.usage()}))
        self._send(out)
        self._reply.end()

    def failed(self, error: RequestError) -> None:
        """Answer with the error, or end the stream with it; never silently."""
        if not self._streaming:
            respond_error(self._generation, error)
            return
        self._send([b"data: %b\n\n" % openai_error(error)])
        self._reply.end()

    def _chunk(self, choice: Choice, members: bytes, logprobs: bytes = b"null", finish: bytes = b"null") -> bytes:
        return b'%b%b,"logprobs":%b,"finish_reason":%b}]%b}\n\n' % (
            self._heads[choice.index],
            members,
            logprobs,
            finish,
            self._usage_member(),
        )

    def _usage_member(self) -> bytes:
        if self._running_usage:
            return b',"usage":%b' % orjson.dumps(self._envelope.usage())
        return b',"usage":null' if self._include_usage else b""

    def _send(self, parts: Sequence[bytes]) -> None:
        self._streaming = True
        self._reply.stream(b"".join(parts))


def respond_error(generation: Generation, error: RequestError) -> None:
    """Answer a request of which nothing was sent yet."""
    headers = {"Retry-After": "1"} if error.status == 503 else {}
    generation.reply.respond(error.status, openai_error(error), headers=headers)
