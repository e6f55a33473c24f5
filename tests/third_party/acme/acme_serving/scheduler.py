"""Shortest prompt first. What decodes goes on; of the prompts, the one with least left to compute is next."""

from itertools import islice

import numpy as np
from llmcore.api.sched import Decision

LOOK_AHEAD = 32
"""Requests of the queue that are compared; each costs a look into the prefix cache."""
PATIENCE = 200
"""Steps after which a request is served in its turn, however long it is."""


class ShortestPrompt:
    """llmcore.api.sched.SchedulerPolicy."""

    def __init__(self, limits):
        self.prompts_first = False

    def plan(self, view):
        """Where prompts are not cut, every other step is offered to them first: else decode rows leave no room."""
        self.prompts_first = view.whole and not self.prompts_first
        decodes, n_query = np.flatnonzero(view.remaining == 1), np.zeros_like(view.remaining)
        left = view.budget
        if not self.prompts_first:
            n_query[decodes[:left]] = 1
            left -= len(decodes[:left])
        prompts = np.flatnonzero(view.remaining > 1)
        for row in prompts[np.argsort(view.remaining[prompts], kind="stable")]:
            n_query[row] = piece(view, int(view.remaining[row]), left)
            left -= int(n_query[row])
        admit = []
        for candidate in self.queue(view) if view.admit and left > 0 else ():
            first = piece(view, candidate.tokens - candidate.cached, left)
            if first == 0 or not view.fits(candidate):
                break
            admit.append((candidate.index, first))
            left -= first
        if self.prompts_first:
            n_query[decodes[:left]] = 1
        rows = np.flatnonzero(n_query)
        return Decision(view.running[rows], n_query[rows], admit)

    def queue(self, view):
        """The head of the queue, those who waited too long before the short ones."""
        return sorted(
            islice(view.waiting(), LOOK_AHEAD), key=lambda r: (r.waited < PATIENCE, r.tokens - r.cached, r.index)
        )


def piece(view, need, left):
    """Tokens of a prompt to compute now, 0 if it has to wait."""
    if view.whole:
        need = min(need, view.budget)
        return need if need <= left else 0
    return min(need, view.chunk, left)
