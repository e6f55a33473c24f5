"""First come, first served: first the requests that decode, then running prompts, then the queue, oldest first."""

from __future__ import annotations

from collections.abc import Iterable

from llmcore.api import SchedulerSpec, hookimpl
from llmcore.api.sched import Decision, SchedulerLimits, SchedulerView, Share


class FCFS:
    """Fills a step's budget with decode rows, then with prompts, oldest first.

    The first waiting request that does not fit blocks those behind it. If prompts are not cut into chunks, a prompt
    that does not fit beside the decode rows gets a step without them, at most every second step.
    """

    def __init__(self, limits: SchedulerLimits) -> None:
        del limits
        self._paused = False

    def plan(self, view: SchedulerView) -> Decision:
        """The rows of this step, and the requests that join."""
        share = Share(view, may_pause=not self._paused)
        for row in share.prompts():
            share.compute(row)
        for candidate in view.waiting() if view.admit and share.open else ():
            if not share.admit(candidate):
                break
        self._paused = share.paused
        return share.decision()


@hookimpl
def register_schedulers() -> Iterable[SchedulerSpec]:
    """`fcfs`, the default of `--scheduler`."""
    yield SchedulerSpec(name="fcfs", make=f"{__name__}:FCFS", summary="first come, first served")
