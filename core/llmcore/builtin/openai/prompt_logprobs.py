"""What `prompt_logprobs` adds to answers, as vLLM's clients read it, and how much of prompts a request may ask for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson

from llmcore.api import MOST_PROMPT_LOGPROBS, ChoiceEvent, RequestError, Tokenizer
from llmcore.api.http import clamped
from llmcore.builtin.openai.logprobs import TokenNames

MOST_SHOWN = 4 * MOST_PROMPT_LOGPROBS
"""Most log-probabilities of prompts in one answer: some 40 MB of JSON."""


class PromptLogprobs:
    """Per prompt a list over its tokens: null for the first, then {token id: {logprob, rank, decoded_token}} of the
    prompt's own token and of the `top` best, best first.
    """

    def __init__(self, tokenizer: Tokenizer, prompts: Sequence[Sequence[int]], top: int) -> None:
        self._names = TokenNames(tokenizer)
        self._prompts = prompts
        self._top = top
        # As JSON, which takes a tenth of what the objects would, until the answer is complete.
        self._known: dict[int, bytes] = {}

    def hear(self, prompt: int, event: ChoiceEvent) -> None:
        """Keep what an event says of prompt number `prompt`."""
        if event.prompt_logprobs:
            own = zip(self._prompts[prompt][1:], event.prompt_logprobs, event.prompt_ranks, strict=True)
            best = event.prompt_top or ((),) * len(event.prompt_logprobs)
            places = [self._place(*mine, top[: self._top]) for mine, top in zip(own, best, strict=True)]
            self._known[prompt] = orjson.dumps([None, *places])

    def of(self, prompt: int) -> dict[str, Any]:
        """The member of a choice, or of the answer: a prompt of one token has nothing that anybody could know."""
        return {"prompt_logprobs": orjson.Fragment(self._known.get(prompt, b"[null]"))}

    def _place(self, token: int, logprob: float, rank: int, best: Sequence[tuple[int, float]]) -> dict[str, Any]:
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
    if most > MOST_PROMPT_LOGPROBS or shown > MOST_SHOWN:
        raise RequestError(
            f"{param}: at most {MOST_PROMPT_LOGPROBS:,} log-probabilities are told of one prompt, and at most "
            f"{MOST_SHOWN:,} in one answer; these would be {most:,} and {shown:,}. Ask for fewer beside each token, "
            "or send shorter prompts, or fewer at once.",
            param=param,
            code="invalid_value",
        )
