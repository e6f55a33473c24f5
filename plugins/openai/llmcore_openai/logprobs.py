"""Log-probabilities as OpenAI's two endpoints show them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

from llmcore_server.api import Place, TokenNames, clamped


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
