"""Who waits, what there is room for, and the end of those that waited too long."""

from __future__ import annotations

import time
from dataclasses import dataclass

from llmcore.bridge import StepEvents
from llmcore.sched.departures import Departures
from llmcore.sched.events import add_errors
from llmcore.sched.state import State


@dataclass(frozen=True)
class Crowd:
    """Choices that wait and the tokens they will compute first; `places` for choices and KV `slots`, in tokens, that
    no request holds."""

    choices: int
    tokens: int
    places: int
    slots: int


def crowd(state: State) -> Crowd:
    """What there is now. Slots are those of the first group."""
    group = state.space.groups[0]
    free = (group.pool.total - group.pool.live) * group.granule
    return Crowd(state.queue.choices, state.queue.tokens, state.table.places, free)


def expire(state: State, departures: Departures, before: float, error: tuple[str, str]) -> dict[int, StepEvents]:
    """End with `error` who was received before that time and has never run. Returns errors by owner, as events."""
    events: dict[int, StepEvents] = {}
    for job in [job for job in state.queue.fresh() if 0.0 < job.submit.received < before]:
        add_errors(events, [job], error, time.monotonic())
        departures.end(job)
    return events
