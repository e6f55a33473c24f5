"""Answers as TGI sends them: one generated text, details on request, one event per token."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import orjson
from llmcore.api import ChoiceEvent, Finish, RequestError, Tokenizer
from llmcore_server.api import Best, Choice, Generation, Places, clamped, listed, pieces, released_by_token

_EVENT = b"data:%b\n\n"


def encode_error(error: RequestError) -> bytes:
    """TGI's two fields: what is wrong, and the class of errors that its clients raise."""
    kind = "validation"
    if error.status == 429 or error.code == "server_overloaded":
        kind = "overloaded"
    elif error.status >= 500:
        kind = "generation"
    return orjson.dumps({"error": error.message, "error_type": kind})


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The shown parts of an answer. `seed`: None for a greedy one. `prefix`: stands before the text."""

    tokenizer: Tokenizer
    eos_ids: frozenset[int]
    prompt: Sequence[int]
    prefix: str
    details: bool
    prefill: bool
    seed: int | None
    top: int
    listed: bool

    def token(self, token: int, logprob: float, released: str | None = None) -> dict[str, Any]:
        """A token of an answer. `released`: the text that it completed, to which a special token adds its own."""
        special = token in self.tokenizer.special_ids
        text = released or ""
        if special or released is None:
            text += self.text_of(token)
        return {"id": token, "text": text, "logprob": clamped(logprob), "special": special}

    def text_of(self, token: int) -> str:
        """A token's text by itself."""
        return self.tokenizer.decode([token], skip_special_tokens=False)

    def best(self, pairs: Best) -> list[dict[str, Any]]:
        """The best tokens in a token's place."""
        return [self.token(token, logprob) for token, logprob in pairs[: self.top]]

    def reason(self, choice: Choice, last: int) -> str:
        """Why a choice ended whose last token is `last`."""
        if choice.text.finish is Finish.LENGTH:
            return "length"
        return "eos_token" if last in self.eos_ids and not choice.text.must_finish else "stop_sequence"


@dataclass
class _Answer:
    """One choice as it grows. `text`: in UTF-8. `total`: the sum of its log-probabilities. `places`: its tokens, where
    they are shown; a place's mark is where the token's text ends, in bytes."""

    text: bytearray = field(default_factory=bytearray)
    total: float = 0.0
    count: int = 0
    last: int = -1
    places: Places = field(default_factory=Places)
    reason: str = ""

    @property
    def mean(self) -> float:
        """Log-probability per token, by which answers are compared."""
        return self.total / max(1, self.count)


class WholeWriter:
    """/generate: the answer, or of several the one with the highest log-probability per token."""

    def __init__(self, generation: Generation, shape: Shape):
        self._generation = generation
        self._shape = shape
        self._answers = [_Answer() for _ in generation.choices]
        self._prompt_logprobs = array("f")

    def write(self, choice: Choice, event: ChoiceEvent, texts: list[str]) -> None:
        """Collect."""
        shape, answer = self._shape, self._answers[choice.index]
        self._prompt_logprobs.extend(event.prompt_logprobs)
        for piece in released_by_token(choice, event, texts):
            answer.text += piece.text.encode()
            if piece.token is not None:
                answer.last = piece.token
                answer.count += 1
                answer.total += clamped(piece.logprob)
                if shape.details:
                    answer.places.add(len(answer.text), piece.token, piece.logprob, piece.best[: shape.top])
        if choice.text.finish is not Finish.RUNNING:
            answer.reason = shape.reason(choice, answer.last)

    def done(self) -> None:
        """Answer."""
        shape = self._shape
        best = max(self._answers, key=lambda answer: answer.mean)
        body: dict[str, Any] = {"generated_text": shape.prefix + best.text.decode()}
        if shape.details:
            body["details"] = self._details(best)
            others = [answer for answer in self._answers if answer is not best]
            if others:
                body["details"]["best_of_sequences"] = [
                    {"generated_text": shape.prefix + other.text.decode(), **self._details(other)} for other in others
                ]
        usage = self._generation.usage()
        headers = {"x-prompt-tokens": str(usage.prompt), "x-generated-tokens": str(best.count)}
        made: Any = [body] if shape.listed else body
        self._generation.reply.respond_in_pieces(pieces(made), headers=headers)

    def failed(self, error: RequestError) -> None:
        """Answer with the error."""
        self._generation.fail(error, encode_error)

    def _details(self, answer: _Answer) -> dict[str, Any]:
        shape = self._shape
        details: dict[str, Any] = {
            "finish_reason": answer.reason,
            "generated_tokens": answer.count,
            "seed": shape.seed,
            "prefill": listed(self._prefill()) if shape.prefill else [],
            "tokens": listed(self._tokens(answer)),
        }
        if shape.top:
            details["top_tokens"] = listed(shape.best(best) for _, _, _, best in answer.places)
        return details

    def _tokens(self, answer: _Answer) -> Iterator[dict[str, Any]]:
        begin = 0
        for end, token, logprob, _ in answer.places:
            yield self._shape.token(token, logprob, answer.text[begin:end].decode())
            begin = end

    def _prefill(self) -> Iterator[dict[str, Any]]:
        """The prompt's tokens; nothing comes before the first, so it has no log-probability."""
        logprobs = chain((None,), map(clamped, self._prompt_logprobs))
        for token, logprob in zip(self._shape.prompt, logprobs, strict=False):
            yield {"id": token, "text": self._shape.text_of(token), "logprob": logprob}


class StreamWriter:
    """/generate_stream: one event per token; the last one has the whole text and, if asked for, details."""

    def __init__(self, generation: Generation, shape: Shape):
        self._generation = generation
        self._reply = generation.reply
        self._shape = shape
        self._texts: list[str] = []
        self._count = 0
        self._last = 0

    def write(self, choice: Choice, event: ChoiceEvent, texts: list[str]) -> None:
        """Send an event per token."""
        self._texts += texts
        out = []
        for piece in released_by_token(choice, event, texts):
            if piece.token is not None:
                self._count += 1
                self._last = piece.token
            token = self._shape.token(self._last, piece.logprob, piece.text)
            out.append(self._event(token, self._shape.best(piece.best), choice if piece.ends else None))
        if out:
            self._reply.stream(b"".join(out))

    def done(self) -> None:
        """End the stream; there is no [DONE]."""
        self._reply.end()

    def failed(self, error: RequestError) -> None:
        """Answer with the error, or end the stream with it."""
        self._generation.fail(error, encode_error, _EVENT)

    def _event(self, token: dict[str, Any], best: list[dict[str, Any]], ended: Choice | None) -> bytes:
        shape = self._shape
        event: dict[str, Any] = {"index": self._count, "token": token}
        if shape.top:
            event["top_tokens"] = best
        event["generated_text"] = None if ended is None else shape.prefix + "".join(self._texts)
        event["details"] = None
        if ended is not None and shape.details:
            event["details"] = {
                "finish_reason": shape.reason(ended, self._last),
                "generated_tokens": self._count,
                "seed": shape.seed,
                "input_length": len(shape.prompt),
            }
        return _EVENT % orjson.dumps(event)
