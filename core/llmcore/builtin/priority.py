"""Schedule lower priority numbers first; with equal numbers, first come, first served."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from llmcore.api import SchedulerSpec, hookimpl
from llmcore.api.sched import Decision, RequestInfo, SchedulerLimits, SchedulerView, Share

TURN = 32
"""Steps after which the oldest running request gets a turn whatever its priority is.

Core overrules a policy that passes it over for much longer.
"""


class Priority:
    """Requests that decode go on. Of the running and waiting prompts, those with the lowest number are computed first.

    The first waiting request that does not fit blocks those behind it, so that small requests do not starve a large
    one. Requests with a high number may wait as long as others keep arriving.
    """

    def __init__(self, limits: SchedulerLimits) -> None:
        del limits
        self._paused = False
        self._passed_over = 0

    def plan(self, view: SchedulerView) -> Decision:
        """The rows of this step, and the requests that join."""
        share, turn = Share(view, may_pause=not self._paused), self._passed_over >= TURN
        queue = view.waiting(_priority) if view.admit and share.open else iter(())
        head = next(queue, None)
        for row in sorted(share.prompts().tolist(), key=lambda row: _key(view, row, turn)):
            while head is not None and head.info.priority < _key(view, row, turn):
                head = next(queue, None) if share.admit(head) else None
            share.compute(row)
        while head is not None:
            head = next(queue, None) if share.admit(head) else None
        self._paused = share.paused
        decision = share.decision()
        self._passed_over = 0 if _ran(view, decision, turn) else self._passed_over + 1
        return decision


def _priority(info: RequestInfo) -> int:
    return info.priority


def _key(view: SchedulerView, row: int, turn: bool) -> float:
    """The sort key of a prompt. The oldest request comes first in its turn."""
    return -np.inf if turn and row == 0 else view.info(int(view.running[row])).priority


def _ran(view: SchedulerView, decision: Decision, turn: bool) -> bool:
    """True if the oldest request computes as much as it can, or in its turn at least one token.

    If the rest of a step's budget is less than a granule, core leaves the row out.
    """
    if not view.running.size:
        return True
    tokens = decision.n_query[decision.rows == view.running[0]]
    return bool(tokens.size) and (turn or bool(tokens[0] == min(view.remaining[0], view.chunk)))


@hookimpl
def register_schedulers() -> Iterable[SchedulerSpec]:
    """`--scheduler priority`."""
    yield SchedulerSpec(
        name="priority",
        make=f"{__name__}:Priority",
        priorities=True,
        summary="lower priority numbers first, then first come, first served",
    )
