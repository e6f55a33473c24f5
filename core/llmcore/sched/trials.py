"""What becomes of requests whose step failed: each is tried again alone, and who fails again ends with an error."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping

import numpy as np

from llmcore.protocols import Int32
from llmcore.sched.departures import Departures
from llmcore.sched.flight import Flight
from llmcore.sched.job import NO_ROW, Job
from llmcore.sched.state import State
from llmcore.sched.view import StepView

TRIALS = 3
"""Failed steps after which a request that could never be tried alone, for want of room, ends with an error."""


class Trials:
    """The suspects, oldest first. As long as there are any, only the first of them runs."""

    def __init__(self, state: State, departures: Departures) -> None:
        self._state = state
        self._departures = departures
        self._suspects: deque[Job] = deque()

    def suspect(self) -> Job | None:
        """Who is on trial."""
        while self._suspects and self._suspects[0].ended:
            self._suspects.popleft()
        return self._suspects[0] if self._suspects else None

    def view(self, suspect: Job, running: Int32) -> StepView:
        """A step for `suspect` alone: all beams of a search together."""
        state = self._state
        if suspect.row == NO_ROW:
            return StepView(state, running[:0], [suspect], admit=True)
        alone = running == suspect.row
        if suspect.beams is not None:
            mine = [row for row, beams in state.table.beams.items() if beams is suspect.beams]
            alone = np.isin(running, mine)
        return StepView(state, running[alone], [], admit=True)

    def passed(self) -> None:
        """The suspect got a token, which shows that it was not the cause."""
        # A search starts again from its prompt, so only its end shows that.
        if self._suspects[0].beams is None:
            self._suspects.popleft()

    def dismiss(self) -> None:
        """There is no room for the suspect beside those that wait for its trial: go on with everyone."""
        for job in self._suspects:
            job.untried += 1
        self._suspects.clear()

    def take_back(self, flights: Iterable[Flight]) -> list[Job]:
        """Discard the steps `flights`, of which the last is the one that failed; returns those in it who must end.

        All others compute again what these steps wrote, and so does everyone who took it from the cache.
        """
        table = self._state.table
        lost: dict[int, int] = {}
        accused: list[Job] = []
        for flight in flights:
            _note_all(lost, self._uncached(flight))
            mine = flight.plan.request[table.epoch[flight.plan.request] == flight.row_epoch]
            born = flight.plan.sample_request[table.epoch[flight.plan.sample_request] == flight.sample_epoch]
            rows = list(dict.fromkeys([*mine.tolist(), *born.tolist()]))
            _note_all(lost, {row: int(table.settled[row]) for row in rows})
            accused = [table.job(row) for row in rows]
        for row, valid in lost.items():
            if table.jobs[row] is not None:  # no beam of a search that went back with another
                self._departures.recompute(row, valid)
        tried = set(self._suspects)
        accused = [job for job in accused if not job.ended]
        self._suspects = deque(sorted({*tried, *accused}, key=lambda job: job.arrival))
        return [job for job in accused if job in tried or job.untried >= TRIALS]

    def _uncached(self, flight: Flight) -> dict[int, int]:
        """Take what a step put into the cache out again; per running row that has any of it, where that begins."""
        state = self._state
        takers: dict[int, int] = {}
        for entered in flight.entered:
            rows = state.space.remove(entered.salt, entered.content, entered.start, state.table.running())
            _note_all(takers, {int(row): entered.start for row in rows})
        return takers


def _note_all(lost: dict[int, int], more: Mapping[int, int]) -> None:
    """What is valid of a row is the least that anybody says."""
    for row, valid in more.items():
        lost[row] = min(valid, lost.get(row, valid))
