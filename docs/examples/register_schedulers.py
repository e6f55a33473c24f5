"""A scheduling policy: beside the answers it computes one prompt at a time, the oldest first."""

from llmcore.api import SchedulerSpec, hookimpl
from llmcore.api.sched import Share


@hookimpl
def register_schedulers():
    yield SchedulerSpec(name="one-prompt", make=f"{__name__}:OnePrompt")


class OnePrompt:
    """api.sched.SchedulerPolicy. Core validates its decisions, so it cannot leak slots or starve a request forever."""

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
