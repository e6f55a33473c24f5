"""Answers as LightLLM sends them: lists and scalars, `data:` without a space, one event per token."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import Any

import orjson
from llmcore.api import ChoiceEvent, RequestError, Tokenizer
from llmcore_server.api import (
    FINISH_REASONS,
    Choice,
    Generation,
    Places,
    clamped,
    listed,
    openai_error,
    pieces,
    released_by_token,
)

_EVENT = b"data:%b\n\n"


def encode_error(error: RequestError) -> bytes:
    """LightLLM's `message` beside the error object that every dialect of this server has."""
    return orjson.dumps({"message": error.message, **orjson.loads(openai_error(error))})


class WholeWriter:
    """/generate: collects every choice and answers once.

    With `details`, each token is listed; its `cumlogprob` is the running mean of the log-probabilities, as in
    LightLLM. If the server returns the prompt's log-probabilities, `prompt_logprobs` lists [id, {next id: its
    log-probability}] for all its tokens but the last.
    """

    def __init__(self, generation: Generation, tokenizer: Tokenizer, *, details: bool):
        self._generation = generation
        self._special = tokenizer.special_ids
        self._texts = [bytearray() for _ in generation.choices]
        # a place's mark is where its token's text ends, in bytes
        self._tokens = [Places() for _ in generation.choices] if details else None
        self._prompt_logprobs = array("f")

    def write(self, choice: Choice, event: ChoiceEvent, texts: list[str]) -> None:
        """Collect."""
        self._prompt_logprobs.extend(event.prompt_logprobs)
        text = self._texts[choice.index]
        for piece in released_by_token(choice, event, texts):
            text += piece.text.encode()
            if self._tokens is not None and piece.token is not None:
                self._tokens[choice.index].add(len(text), piece.token, piece.logprob)

    def done(self) -> None:
        """Answer. A member with one value per choice is a scalar if there is one choice, but the text is a list."""
        choices, prompt_tokens = self._generation.choices, self._generation.usage().prompt
        answer: dict[str, Any] = {
            "generated_text": [text.decode() for text in self._texts],
            "count_output_tokens": _scalar([choice.text.tokens for choice in choices]),
            "finish_reason": _scalar([FINISH_REASONS[choice.text.finish] for choice in choices]),
            "prompt_tokens": prompt_tokens,
        }
        if self._tokens is not None:
            details = zip(self._texts, self._tokens, strict=True)
            answer["tokens"] = _scalar([listed(self._details(*one, prompt_tokens)) for one in details])
        submit = self._generation.request.submits[0]
        if submit.prompt_logprobs:
            ids = submit.prompt.ids.tolist()
            answer["prompt_token_ids"] = ids
            answer["prompt_logprobs"] = listed(
                [token, {str(following): clamped(logprob)}]
                for token, following, logprob in zip(ids, ids[1:], self._prompt_logprobs, strict=False)
            )
        self._generation.reply.respond_in_pieces(pieces(answer))

    def _details(self, text: bytearray, tokens: Places, prompt_tokens: int) -> Iterator[dict[str, Any]]:
        begin, total = 0, 0.0
        for count, (end, token, logprob, _) in enumerate(tokens, 1):
            total += clamped(logprob)
            yield {
                "id": token,
                "logprob": clamped(logprob),
                "cumlogprob": total / count,
                "special": token in self._special,
                "count_output_tokens": count,
                "prompt_tokens": prompt_tokens,
                "mtp_accepted_token_num": 0,
                "text": text[begin:end].decode(),
            }
            begin = end

    def failed(self, error: RequestError) -> None:
        """Answer with the error."""
        self._generation.fail(error, encode_error)


class ScoreWriter:
    """/get_score: a number, or a list where the model gives several."""

    def __init__(self, generation: Generation):
        self._generation = generation
        self._scores: tuple[float, ...] = ()

    def write(self, choice: Choice, event: ChoiceEvent, texts: list[str]) -> None:
        """The one event."""
        self._scores = event.scores

    def done(self) -> None:
        """Answer; like LightLLM's, the request ends because its one token was produced."""
        answer = {
            "score": _scalar(list(self._scores)),
            "prompt_tokens": self._generation.usage().prompt,
            "finish_reason": "length",
        }
        self._generation.reply.respond(200, orjson.dumps(answer))

    def failed(self, error: RequestError) -> None:
        """Answer with the error."""
        self._generation.fail(error, encode_error)


class StreamWriter:
    """/generate_stream: one event per token of the one choice; its text is empty while some of it is held back."""

    def __init__(self, generation: Generation, tokenizer: Tokenizer):
        self._generation = generation
        self._reply = generation.reply
        self._special = tokenizer.special_ids
        self._prompt_tokens = generation.usage().prompt
        self._count = 0
        self._last = 0

    def write(self, choice: Choice, event: ChoiceEvent, texts: list[str]) -> None:
        """Send an event per token."""
        out = []
        for piece in released_by_token(choice, event, texts):
            if piece.token is not None:
                self._count += 1
                self._last = piece.token
            reason = FINISH_REASONS[choice.text.finish] if piece.ends else None
            out.append(self._event(piece.text, clamped(piece.logprob), reason))
        if out:
            self._reply.stream(b"".join(out))

    def done(self) -> None:
        """End the stream; there is no [DONE]."""
        self._reply.end()

    def failed(self, error: RequestError) -> None:
        """Answer with the error, or end the stream with it."""
        self._generation.fail(error, encode_error, _EVENT)

    def _event(self, text: str, logprob: float, reason: str | None) -> bytes:
        event = {
            "token": {
                "id": self._last,
                "text": text,
                "logprob": logprob,
                "special": self._last in self._special,
                "count_output_tokens": self._count,
                "prompt_tokens": self._prompt_tokens,
            },
            "generated_text": None,
            "finished": reason is not None,
            "finish_reason": reason,
            "details": None,
        }
        return _EVENT % orjson.dumps(event)


def _scalar(values: list[Any]) -> Any:
    return values[0] if len(values) == 1 else values
