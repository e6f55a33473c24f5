"""A scheduling policy: one prompt at a time beside the answers, the oldest first."""

from llmcore.api import SchedulerSpec, hookimpl
from llmcore.api.sched import Share


@hookimpl
def register_schedulers():
    yield SchedulerSpec(name="one-prompt", make=f"{__name__}:OnePrompt")


class OnePrompt:
    """api.sched.SchedulerPolicy. Core validates what it returns, so it cannot leak or starve anybody for ever."""

    def __init__(self, limits):
        self.paused = False

    def plan(self, view):
        share = Share(view, may_pause=not self.paused)
        prompts = share.prompts()
        if prompts.size:
            share.compute(prompts[0])
        elif view.admit:
            for candidate in view.waiting():
                share.admit(candidate)
                break
        self.paused = share.paused
        return share.decision()
