"""Answers as OpenAI sends them, whole or as a stream of chunks; chat and text completions differ only in a `Shape`."""

from __future__ import annotations

import time
import uuid
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import orjson
from llmcore.api import ChoiceEvent, Finish, RequestError
from llmcore.api.text import Event
from llmcore_server.api import (
    Choice,
    Front,
    Generation,
    Place,
    Places,
    UnshownTokens,
    clamped,
    listed,
    openai_error,
    pieces,
)

from llmcore_openai.requests import StreamOptions

Logprobs = Mapping[str, Iterable[Any] | None]
"""The members of a `logprobs`, of which each is an array or null. An array is gone through once."""

_RUNNING = Finish.RUNNING
_DONE = b"data: [DONE]\n\n"


class Shape(Protocol):
    """The differences between chat and text completions."""

    id_prefix: str
    object: str
    chunk_object: str

    answers: bool
    """False if the client asked for the prompt alone, and not for generated text."""

    every_token: bool
    """True if tokens without text have logprobs, too."""

    prompts: bool
    """True if one request may have several prompts."""

    def hear(self, choice: Choice, event: ChoiceEvent) -> None:
        """Take the parts of an event that are not tokens."""

    def opening(self, choice: Choice) -> bytes | None:
        """The members of the first chunk of a choice, if it has one of its own."""

    def pieces(self, choice: Choice, text: str) -> Sequence[bytes]:
        """The members of the chunks that hold what is new: `text`, or what parsers made of it."""

    def opened(self, choice: Choice) -> Logprobs | None:
        """The logprobs of what the opening shows."""

    def logprobs(self, choice: Choice, places: Iterable[Place]) -> Logprobs:
        """The logprobs of some tokens."""

    def all_logprobs(self, choice: Choice, places: Iterable[Place]) -> Logprobs:
        """The logprobs of a whole choice."""

    def whole(self, choice: Choice, text: str, events: Sequence[Event]) -> dict[str, Any]:
        """The members of a whole choice that hold its text, or what parsers made of it."""

    def beside(self) -> dict[str, Any]:
        """The members of a whole answer that belong to no choice."""

    def finish_reason(self, choice: Choice) -> str:
        """Why a choice ended."""

    closing: bytes
    """The members of a choice's last chunk."""


class Envelope:
    """The members that every chunk of an answer repeats, or that the whole answer has."""

    def __init__(self, front: Front, generation: Generation, shape: Shape):
        self.id = f"{shape.id_prefix}-{uuid.uuid4().hex}"
        self.created = int(time.time())
        self.model = front.model_name
        self._fingerprint = {"system_fingerprint": f"fp_{front.facts.fingerprint}"} if front.facts.fingerprint else {}
        self._generation = generation
        self._answers = shape.answers

    def members(self, kind: str) -> dict[str, Any]:
        """id, object, created, model, and a name for all that decides what a seed gives."""
        members = {"id": self.id, "object": kind, "created": self.created, "model": self.model}
        return {**members, **self._fingerprint}

    def usage(self) -> dict[str, Any]:
        """Tokens so far."""
        usage = self._generation.usage()
        output = usage.output if self._answers else 0
        members: dict[str, Any] = {
            "prompt_tokens": usage.prompt,
            "completion_tokens": output,
            "total_tokens": usage.prompt + output,
            "prompt_tokens_details": {"cached_tokens": usage.cached},
        }
        if usage.reasoning is not None:
            members["completion_tokens_details"] = {"reasoning_tokens": usage.reasoning}
        return members


class WholeWriter:
    """Collects every choice and answers once. The answer is encoded while the client reads it."""

    def __init__(self, front: Front, generation: Generation, shape: Shape, *, logprobs: bool, ids: bool):
        self._generation = generation
        self._ids = TokenIds(generation, beside=shape.prompts) if ids else None
        self._shape = shape
        self._envelope = Envelope(front, generation, shape)
        self._texts = [bytearray() for _ in generation.choices]
        self._events: list[list[Event]] = [[] for _ in generation.choices]
        self._shown = [Places() for _ in generation.choices]
        self._pending = pending(generation, shape) if logprobs else None

    def write(self, choice: Choice, event: ChoiceEvent, texts: list[str]) -> None:
        """Collect."""
        self._shape.hear(choice, event)
        self._texts[choice.index] += "".join(texts).encode()
        if self._ids is not None:
            self._ids.hear(choice, event)
        self._events[choice.index] += choice.events or ()
        if self._pending is not None:
            self._shown[choice.index].extend(self._pending[choice.index].take(choice, event))

    def done(self) -> None:
        """Answer."""
        answer = self._envelope.members(self._shape.object)
        answer["choices"] = [self._choice(i, choice) for i, choice in enumerate(self.chosen())]
        answer["usage"] = self._envelope.usage()
        answer |= self._shape.beside()
        if self._ids is not None:
            answer |= self._ids.of_answer()
        self._generation.reply.respond_in_pieces(pieces(answer))

    def failed(self, error: RequestError) -> None:
        """Answer with the error."""
        self._generation.fail(error, openai_error)

    def chosen(self) -> Sequence[Choice]:
        """The choices that are sent."""
        return self._generation.choices

    def _choice(self, index: int, choice: Choice) -> dict[str, Any]:
        known = None if self._pending is None else self._shape.all_logprobs(choice, self._shown[choice.index])
        return {
            "index": index,
            **self._shape.whole(choice, self._texts[choice.index].decode(), self._events[choice.index]),
            "logprobs": _members(known, listed),
            "finish_reason": self._shape.finish_reason(choice),
            **({} if self._ids is None else self._ids.of_choice(choice)),
        }


class BestWriter(WholeWriter):
    """Of every prompt's answers, sends the `n` with the highest log-probability per token, best first."""

    def __init__(self, front: Front, generation: Generation, shape: Shape, *, logprobs: bool, ids: bool, n: int):
        super().__init__(front, generation, shape, logprobs=logprobs, ids=ids)
        self._n = n
        self._sums = [0.0 for _ in generation.choices]

    def write(self, choice: Choice, event: ChoiceEvent, texts: list[str]) -> None:
        """Collect."""
        super().write(choice, event, texts)
        self._sums[choice.index] += sum(map(clamped, event.logprobs[: len(choice.text.starts)]))

    def chosen(self) -> Sequence[Choice]:
        """In the order of the prompts."""
        best: dict[int, list[Choice]] = {}
        for choice in sorted(self._generation.choices, key=self._mean, reverse=True):
            best.setdefault(choice.prompt, []).append(choice)
        return [choice for prompt in sorted(best) for choice in best[prompt][: self._n]]

    def _mean(self, choice: Choice) -> float:
        return self._sums[choice.index] / max(1, choice.text.tokens)


class StreamWriter:
    """Sends chunks as text is released: per choice an opening, pieces, and a closing with the finish reason."""

    __slots__ = (
        *("_envelope", "_generation", "_heads", "_ids", "_include_usage", "_opened", "_pending", "_reply"),
        *("_running_usage", "_shape"),
    )

    def __init__(
        self,
        front: Front,
        generation: Generation,
        shape: Shape,
        *,
        logprobs: bool,
        options: StreamOptions | None,
        ids: bool = False,
    ):
        self._reply = generation.reply
        self._ids = TokenIds(generation, beside=shape.prompts) if ids else None
        self._generation = generation
        self._shape = shape
        self._envelope = Envelope(front, generation, shape)
        head = orjson.dumps(self._envelope.members(shape.chunk_object))[:-1]
        self._heads = [b'data: %b,"choices":[{"index":%d,' % (head, choice.index) for choice in generation.choices]
        self._opened = [False for _ in generation.choices]
        self._pending = pending(generation, shape) if logprobs else None
        self._include_usage = bool(options and options.include_usage)
        self._running_usage = self._include_usage and bool(options and options.continuous_usage_stats)

    def write(self, choice: Choice, event: ChoiceEvent, texts: list[str]) -> None:
        """Send what `texts` and the choice's end come to."""
        out: list[bytes] = []
        self._shape.hear(choice, event)
        if self._ids is not None:
            self._ids.hear(choice, event)
        if not self._opened[choice.index]:
            self._opened[choice.index] = True
            opening = self._shape.opening(choice)
            if opening is not None:
                known = None if self._pending is None else self._shape.opened(choice)
                out.append(self._chunk(choice, opening, _dumped(known)))
        shown = None if self._pending is None else self._pending[choice.index].take(choice, event)
        pieces = self._shape.pieces(choice, "".join(texts))
        logprobs = _dumped(None if shown is None else self._shape.logprobs(choice, shown))
        for members in pieces or ((self._shape.closing,) if shown else ()):
            out.append(self._chunk(choice, members, logprobs))
            logprobs = b"null"
        if choice.text.finish is not _RUNNING:
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
        self._generation.fail(error, openai_error)

    def _chunk(self, choice: Choice, members: bytes, logprobs: bytes = b"null", finish: bytes = b"null") -> bytes:
        inner, outer = b"", self._usage_member()
        if self._ids is not None:
            inner, outer = _more(self._ids.of_choice(choice)), outer + _more(self._ids.of_answer())
        return b'%b%b,"logprobs":%b,"finish_reason":%b%b}]%b}\n\n' % (
            self._heads[choice.index],
            members,
            logprobs,
            finish,
            inner,
            outer,
        )

    def _usage_member(self) -> bytes:
        if self._running_usage:
            return b',"usage":%b' % orjson.dumps(self._envelope.usage())
        return b',"usage":null' if self._include_usage else b""

    def _send(self, parts: Sequence[bytes]) -> None:
        self._reply.stream(b"".join(parts))


def _dumped(logprobs: Logprobs | None) -> bytes:
    """The logprobs of a chunk as JSON."""
    return orjson.dumps(_members(logprobs, list))


def _members(logprobs: Logprobs | None, array: Callable[[Iterable[Any]], Any]) -> dict[str, Any] | None:
    """The same with what `array` makes of its arrays."""
    if logprobs is None:
        return None
    return {name: None if values is None else array(values) for name, values in logprobs.items()}


def _more(members: dict[str, Any]) -> bytes:
    """Members as they follow others in JSON."""
    return b"," + orjson.dumps(members, default=list)[1:-1] if members else b""


def whole_writer(
    front: Front, generation: Generation, shape: Shape, *, logprobs: bool, ids: bool, n: int
) -> WholeWriter:
    """The writer of a whole answer with `n` choices for each prompt, of which there may be more."""
    if len(generation.choices) > n * len(generation.request.submits):
        return BestWriter(front, generation, shape, logprobs=logprobs, ids=ids, n=n)
    return WholeWriter(front, generation, shape, logprobs=logprobs, ids=ids)


def pending(generation: Generation, shape: Shape) -> list[UnshownTokens]:
    """For every choice, its tokens that are not shown yet."""
    return [UnshownTokens(whole=shape.every_token, none=not shape.answers) for _ in generation.choices]


class TokenIds:
    """The tokens of every choice that no chunk has shown yet; of a whole answer all. End tokens are among them. The
    members' values are arrays.

    `beside`: the prompt's tokens stand in the choice and not beside the choices, as completions have it.
    """

    def __init__(self, generation: Generation, *, beside: bool) -> None:
        self._submits = generation.request.submits
        self._beside = beside
        self._waiting = [array("i") for _ in generation.choices]
        self._first = [True for _ in generation.choices]
        self._prompt_shown = False

    def hear(self, choice: Choice, event: ChoiceEvent) -> None:
        """Tokens after a stop are none of the answer."""
        self._waiting[choice.index].extend(event.tokens[: len(choice.text.starts)])

    def of_choice(self, choice: Choice) -> dict[str, Any]:
        """The members of a choice, or of its next chunk; the prompt's come once."""
        members: dict[str, Any] = {"token_ids": self._waiting[choice.index]}
        self._waiting[choice.index] = array("i")
        if self._beside and self._first[choice.index]:
            members["prompt_token_ids"] = self._prompt(choice.prompt)
        self._first[choice.index] = False
        return members

    def of_answer(self) -> dict[str, Any]:
        """The members of the answer, or of the next chunk."""
        if self._beside or self._prompt_shown:
            return {}
        self._prompt_shown = True
        return {"prompt_token_ids": self._prompt(0)}

    def _prompt(self, index: int) -> array[int]:
        return array("i", self._submits[index].prompt.ids.tolist())
