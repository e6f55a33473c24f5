"""First come, first served: what decodes goes on, then prompts in order of arrival, then the queue from its head."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from llmcore.api import SchedulerSpec, hookimpl
from llmcore.api.sched import Decision, Int32, SchedulerLimits, SchedulerView


class FCFS:
    """Fills the budget with decode rows, then chunks, oldest first; the first candidate that does not fit blocks.

    Where prompts are computed whole, one that does not fit beside the decode rows gets a step without them, at
    most every other step.
    """

    def __init__(self, limits: SchedulerLimits) -> None:
        del limits
        self._paused_decode = False

    def plan(self, view: SchedulerView) -> Decision:
        """What to run in this step."""
        if view.whole:
            return self._plan_whole(view)
        n_query, left = _share_out(view)
        admit: list[tuple[int, int]] = []
        for candidate in view.waiting() if view.admit and left > 0 else ():
            if not view.fits(candidate):
                break
            first = min(candidate.tokens - candidate.cached, view.chunk, left)
            admit.append((candidate.index, first))
            left -= first
            if left <= 0:
                break
        rows = np.flatnonzero(n_query)
        return Decision(view.running[rows], n_query[rows], admit)

    def _plan_whole(self, view: SchedulerView) -> Decision:
        decodes = view.remaining == 1
        left = view.budget - int(np.count_nonzero(decodes))
        n_query = np.where(decodes, 1, 0).astype(np.int32)
        alone = False
        for row in np.flatnonzero(~decodes):
            need = min(int(view.remaining[row]), view.budget)
            if need > left and not (alone or self._paused_decode):
                n_query[:], left, alone = 0, view.budget, True
            if need > left:
                break
            n_query[row] = need
            left -= need
        admit: list[tuple[int, int]] = []
        for candidate in view.waiting() if view.admit and left > 0 else ():
            need = min(candidate.tokens - candidate.cached, view.budget)
            pause = need > left and not (alone or admit or self._paused_decode or (n_query > 1).any())
            if (need > left and not pause) or not view.fits(candidate):
                break
            if pause:
                n_query[:], left, alone = 0, view.budget, True
            admit.append((candidate.index, need))
            left -= need
        self._paused_decode = alone
        rows = np.flatnonzero(n_query)
        return Decision(view.running[rows], n_query[rows], admit)


def _share_out(view: SchedulerView) -> tuple[Int32, int]:
    """Tokens per running request: one to each that decodes, then chunks, oldest first; what is left for prompts."""
    wish = np.minimum(view.remaining, view.chunk)
    decodes = view.remaining == 1
    left = view.budget - int(np.count_nonzero(decodes))
    if left < 0:
        over = np.flatnonzero(decodes)[left:]
        wish[over] = 0
        return np.where(decodes, wish, 0).astype(np.int32), 0
    left = min(left, view.prompt_budget)
    chunks = np.flatnonzero(~decodes)
    if chunks.size:
        ahead = np.cumsum(wish[chunks]) - wish[chunks]
        wish[chunks] = np.clip(left - ahead, 0, wish[chunks])
        left -= int(wish[chunks].sum())
    return wish.astype(np.int32), left


@hookimpl
def register_schedulers() -> Iterable[SchedulerSpec]:
    """The default of `--scheduler`."""
    yield SchedulerSpec(name="fcfs", make=f"{__name__}:FCFS", summary="first come, first served")
