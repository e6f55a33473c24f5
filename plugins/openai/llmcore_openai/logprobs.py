"""Log-probabilities as OpenAI's two endpoints show them, and `prompt_logprobs` as vLLM's clients read it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, starmap
from typing import Any

from llmcore.api import MOST_LOGPROBS_AT_ONCE, ChoiceEvent, Tokenizer
from llmcore_server.api import Best, Place, Places, TokenNames, clamped, listed, refusal


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


MOST_SHOWN = 4 * MOST_LOGPROBS_AT_ONCE
"""Most log-probabilities of prompts in one answer: some 40 MB of JSON."""


class PromptLogprobs:
    """Per prompt a list over its tokens: null for the first, then {token id: {logprob, rank, decoded_token}} of the
    prompt's own token and of the `top` best, best first. The marks of the places are ranks.
    """

    def __init__(self, tokenizer: Tokenizer, prompts: Sequence[Sequence[int]], top: int) -> None:
        self._names = TokenNames(tokenizer)
        self._prompts = prompts
        self._top = top
        self._known: dict[int, Places] = {}

    def hear(self, prompt: int, event: ChoiceEvent) -> None:
        """Keep what an event says of prompt number `prompt`."""
        if event.prompt_logprobs:
            places = self._known[prompt] = Places()
            best = event.prompt_top or ((),) * len(event.prompt_logprobs)
            own = self._prompts[prompt][1:]
            for rank, token, logprob, top in zip(event.prompt_ranks, own, event.prompt_logprobs, best, strict=True):
                places.add(rank, token, logprob, top[: self._top])

    def of(self, prompt: int) -> dict[str, Any]:
        """The member of a choice, or of the answer. The first token of a prompt has no log-probability."""
        known = self._known.get(prompt, Places())
        return {"prompt_logprobs": listed(chain((None,), starmap(self._place, known)))}

    def _place(self, rank: int, token: int, logprob: float, best: Best) -> dict[str, Any]:
        place = {str(token): self._entry(token, logprob, rank)}
        for i, (other, likely) in enumerate(best):
            if other != token:
                place[str(other)] = self._entry(other, likely, i + 1)
        return place

    def _entry(self, token: int, logprob: float, rank: int) -> dict[str, Any]:
        return {"logprob": clamped(logprob), "rank": rank, "decoded_token": self._names.text(token)}


def check_most(prompts: Sequence[Sequence[int]], tops: Sequence[int | None], n: int, *, param: str) -> None:
    """Refuse more than the engine tells of one prompt, or an answer holds. `tops`: how many tokens are shown beside
    each of a prompt's own, once for every place where they are; `n`: how many choices show them."""
    each = sum(1 + top for top in tops if top is not None)
    most, shown = each * max(map(len, prompts)), each * n * sum(map(len, prompts))
    if most > MOST_LOGPROBS_AT_ONCE or shown > MOST_SHOWN:
        raise refusal(
            param,
            f"at most {MOST_LOGPROBS_AT_ONCE:,} log-probabilities are told of one prompt, and at most "
            f"{MOST_SHOWN:,} in one answer; these would be {most:,} and {shown:,}. Ask for fewer beside each token, "
            "or send shorter prompts, or fewer at once.",
        )
