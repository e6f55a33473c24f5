"""Log-probabilities as OpenAI's two endpoints show them.

A token is shown once text that begins after it starts has been released, so that entries and text arrive in step, and
tokens that a stop string cut away, or that only end the answer, never appear.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

from llmcore.api import ChoiceEvent, Finish, Tokenizer
from llmcore_server.api import Choice, Place, clamped

_MOST_NAMES = 4096
"""Texts that are kept: log-probabilities name the same few tokens over and over, and a vocabulary is large."""


class TokenNames:
    """Tokens as text and bytes. `prefix` stands before the escapes of a token that is not a whole text. `ids`: the
    text is `token_id:` and the token's id instead, as vLLM's `return_tokens_as_token_ids` has it."""

    def __init__(self, tokenizer: Tokenizer, prefix: str = "", *, ids: bool = False):
        self._tokenizer = tokenizer
        self._prefix = prefix
        self._ids = ids
        self._texts: dict[int, str] = {}

    def bytes(self, token_id: int) -> bytes:
        """The token's bytes; none for ids that pad the model's vocabulary."""
        return self._tokenizer.token_bytes(token_id) if token_id < self._tokenizer.vocab_size else b""

    def text(self, token_id: int) -> str:
        """The token's text, or its bytes escaped, or its id."""
        text = self._texts.get(token_id)
        if text is None:
            if len(self._texts) == _MOST_NAMES:
                self._texts.clear()
            text = self._texts[token_id] = self._text(token_id)
        return text

    def _text(self, token_id: int) -> str:
        if self._ids:
            return f"token_id:{token_id}"
        raw = self.bytes(token_id)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return self._prefix + "".join(f"\\x{byte:02x}" for byte in raw)


class Pending:
    """The tokens of one choice whose text has not been released; a place's mark is where its text begins.

    `whole`: at the end of the choice those that have no text are shown, too. `none`: nothing ever is.
    """

    def __init__(self, *, whole: bool = False, none: bool = False) -> None:
        self._whole, self._none = whole, none
        self._waiting: deque[Place] = deque()

    def take(self, choice: Choice, event: ChoiceEvent) -> list[Place]:
        """The tokens whose text `event` released."""
        if self._none:
            return []
        ended = self._whole and choice.text.finish is not Finish.RUNNING
        for i, start in enumerate(choice.text.starts):
            logprob = event.logprobs[i] if event.logprobs else 0.0
            self._waiting.append((start, event.tokens[i], logprob, event.top[i] if event.top else ()))
        shown = []
        while self._waiting and (ended or self._waiting[0][0] < choice.text.released):
            shown.append(self._waiting.popleft())
        return shown


def chat_entries(names: TokenNames, places: Iterable[Place]) -> Iterator[dict[str, Any]]:
    """`logprobs.content` of chat completions."""
    for _, token, logprob, best in places:
        yield {**_entry(names, token, logprob), "top_logprobs": [_entry(names, other, p) for other, p in best]}


def _entry(names: TokenNames, token: int, logprob: float) -> dict[str, Any]:
    return {"token": names.text(token), "logprob": clamped(logprob), "bytes": list(names.bytes(token))}


Columns = dict[str, Iterable[Any]]


def completion_columns(names: TokenNames, places: Iterable[Place], *, begin: int = 0) -> Columns:
    """`logprobs` of completions: columns over tokens, each of which goes through `places` by itself. `begin`: how many
    characters of the choice's text are before those that the marks count from."""
    return {
        "tokens": (names.text(token) for _, token, _, _ in places),
        "token_logprobs": (clamped(logprob) for _, _, logprob, _ in places),
        "top_logprobs": (
            {names.text(other): clamped(p) for other, p in (*best, (token, logprob))}
            for _, token, logprob, best in places
        ),
        "text_offset": (begin + start for start, _, _, _ in places),
    }


def joined(first: Columns, second: Columns) -> Columns:
    """Columns over the tokens of both."""
    return {name: chain(column, second[name]) for name, column in first.items()}
