"""A scheduling policy: every step either decodes or computes one prompt, the oldest first."""

import numpy as np
from llmcore.api import SchedulerSpec, hookimpl
from llmcore.api.sched import Decision


@hookimpl
def register_schedulers():
    yield SchedulerSpec(name="one-prompt", make=f"{__name__}:OnePrompt")


class OnePrompt:
    """api.sched.SchedulerPolicy. Core validates what it returns, so it cannot leak or starve anybody for ever."""

    def __init__(self, limits):
        self.prompt_next = True

    def plan(self, view):
        decodes = np.flatnonzero(view.remaining == 1)[: view.budget]
        prompts = np.flatnonzero(view.remaining > 1)[:1]
        self.prompt_next = not self.prompt_next
        if prompts.size and (self.prompt_next or not decodes.size):
            limit = view.budget if view.whole else min(view.chunk, view.budget)
            return Decision(view.running[prompts], np.minimum(view.remaining[prompts], limit))
        ones = np.ones(decodes.size, np.int32)
        return Decision(view.running[decodes], ones, [] if prompts.size else self.admitted(view, decodes.size))

    def admitted(self, view, used):
        """The head of the queue, if it fits beside what decodes."""
        left = view.budget - used
        for candidate in view.waiting() if view.admit else ():
            need = candidate.tokens - candidate.cached
            first = min(need, view.budget) if view.whole else min(need, view.chunk, left)
            if view.fits(candidate) and 0 < first <= left:
                return [(candidate.index, first)]
            break
        return []
