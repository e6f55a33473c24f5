"""Shortest prompt first. What decodes goes on; of the prompts, the one with least left to compute is next."""

from itertools import islice

import numpy as np
from llmcore.api.sched import Share

LOOK_AHEAD = 32
"""Requests of the queue that are compared; each costs a look into the prefix cache."""
PATIENCE = 200
"""Steps after which a request is served in its turn, however long it is."""


class ShortestPrompt:
    """llmcore.api.sched.SchedulerPolicy."""

    def __init__(self, limits):
        self.paused = False

    def plan(self, view):
        """Prompts share what the rows that decode leave of a step."""
        share = Share(view, may_pause=not self.paused)
        prompts = share.prompts()
        for row in prompts[np.argsort(view.remaining[prompts], kind="stable")]:
            share.compute(row)
        for candidate in self.queue(view) if view.admit and share.open else ():
            if not share.admit(candidate):
                break
        self.paused = share.paused
        return share.decision()

    def queue(self, view):
        """The head of the queue, those who waited too long before the short ones."""
        return sorted(
            islice(view.waiting(), LOOK_AHEAD), key=lambda r: (r.waited < PATIENCE, r.tokens - r.cached, r.index)
        )
