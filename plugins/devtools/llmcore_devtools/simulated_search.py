"""Beam search on the simulated device, in the plainest form."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from llmcore.api.bridge import Submit

from llmcore_devtools.simulated_device import START, extend, logprobs

Found = tuple[np.float32, list[int]]
"""(score, tokens of the beam)."""


def searched(prompt: Sequence[int], submit: Submit, vocab: int) -> list[list[int]]:
    """The `n` best answers to `prompt`, best first."""
    search = submit.beams
    assert search is not None
    root = START
    for token in prompt:
        root = extend(root, token)
    stops, width = set(submit.stop_ids), search.width
    running: list[Found] = [(np.float32(0), [])]
    ended: list[Found] = []
    for length in range(1, submit.max_new_tokens + 1):
        best = sorted(_continued(running, root, vocab), key=lambda found: -found[0])
        best = [found for found in best if length > submit.min_new_tokens or found[1][-1] not in stops]
        best = best[: max(2, 1 + len(submit.stop_ids)) * width]
        done = [found[1][-1] in stops or length == submit.max_new_tokens for found in best]
        penalty = np.float32(float(length) ** search.length_penalty)
        ended += [(score / penalty, tokens) for (score, tokens), over in zip(best[:width], done, strict=False) if over]
        ended = sorted(ended, key=lambda found: -found[0])[:width]
        running = [found for found, over in zip(best, done, strict=True) if not over][:width]
        if len(ended) == width:
            most = submit.max_new_tokens if search.early_stopping is None and search.length_penalty > 0 else length
            hope = running and running[0][0] / np.float32(float(most) ** search.length_penalty) > ended[-1][0]
            if search.early_stopping or not hope:
                break
    return [tokens for _, tokens in ended[: submit.n]]


def _continued(running: Sequence[Found], root: int, vocab: int) -> list[Found]:
    found: list[Found] = []
    for score, tokens in running:
        state = root
        for token in tokens:
            state = extend(state, token)
        found += [(score + logprob, [*tokens, token]) for token, logprob in enumerate(logprobs(state, vocab))]
    return found
