"""Failure isolation: a failed step, or a row that is not finite, ends only the requests that cause it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping

import numpy as np

from llmcore.api.protocols import Int32
from llmcore.sched.in_flight import InFlight
from llmcore.sched.plan import StepResult
from llmcore.sched.policy import StepView
from llmcore.sched.processors import Reason
from llmcore.sched.release import Release
from llmcore.sched.request import NO_ROW, Choice, State

TRIALS = 3
"""Failed steps after which a request that could never be tried alone, for want of room, ends with an error."""

NOT_FINITE: Reason = (
    "internal_error",
    "the model's output for this request was not finite, or not a token id; if many requests fail like this, check "
    "the weights for NaN and Inf (docs/operators.md, Errors, says how)",
)


class FailureIsolation:
    """After a step has failed, its choices are tried again one at a time. A choice that fails again ends.

    Those that wait for their trial are the suspects, oldest first. As long as there are any, only the first of them
    runs.
    """

    def __init__(self, state: State, release: Release) -> None:
        self._state = state
        self._release = release
        self._suspects: deque[Choice] = deque()

    def suspect(self) -> Choice | None:
        """The choice that is on trial."""
        while self._suspects and self._suspects[0].ended:
            self._suspects.popleft()
        return self._suspects[0] if self._suspects else None

    def view(self, suspect: Choice, running: Int32) -> StepView:
        """A step for `suspect` alone: all beams of a search together."""
        state = self._state
        if suspect.row == NO_ROW:
            return StepView(state, running[:0], [suspect], admit=True)
        alone = running == suspect.row
        if suspect.request.beams is not None:
            mine = [row for row, beams in state.table.beams.items() if beams is suspect.request.beams]
            alone = np.isin(running, mine)
        return StepView(state, running[alone], [], admit=True)

    def passed(self) -> None:
        """The suspect got a token, which shows that it was not the cause."""
        # A search starts again from its prompt, so only its end shows that.
        if self._suspects[0].request.beams is None:
            self._suspects.popleft()

    def dismiss(self) -> None:
        """The suspect does not fit beside those that wait for their trial: go on with all requests."""
        for choice in self._suspects:
            choice.miss_trial()
        self._suspects.clear()

    def take_back(self, discarded: Iterable[InFlight]) -> list[Choice]:
        """Discard steps, newest first, of which the last is the one that failed; returns its choices that must end.

        All others compute again what these steps wrote, and so does every request that took it from the cache.
        """
        table = self._state.table
        lost: dict[int, int] = {}
        accused: list[Choice] = []
        for step in discarded:
            _note_all(lost, self._uncached(step))
            mine = step.plan.request[table.epoch[step.plan.request] == step.row_epoch]
            born = step.plan.sample_request[table.epoch[step.plan.sample_request] == step.sample_epoch]
            rows = list(dict.fromkeys([*mine.tolist(), *born.tolist()]))
            _note_all(lost, {row: int(table.settled[row]) for row in rows})
            accused = [table.choice(row) for row in rows]
        for row, valid in lost.items():
            if table.choices[row] is not None:  # no beam of a search that went back with another
                self._release.recompute(row, valid)
        tried = set(self._suspects)
        accused = [choice for choice in accused if not choice.ended]
        self._suspects = deque(sorted({*tried, *accused}, key=lambda choice: choice.arrival))
        return [choice for choice in accused if choice in tried or choice.untried >= TRIALS]

    def reject(self, step: InFlight, result: StepResult) -> list[Choice]:
        """End the rows whose logits were not finite, the oldest first; returns their choices.

        If it was a prompt's first sample, its KV is not to be trusted: it leaves the cache with all below it, and
        every request that took it computes again. A request that took or loaded KV gets a second chance without.
        """
        plan, table = step.plan, self._state.table
        bad = np.flatnonzero(~result.finite)
        rejected: list[Choice] = []
        for source in plan.sample_row[bad[np.argsort(table.arrival[plan.sample_request[bad]])]]:
            at = bad[plan.sample_row[bad] == source]
            rows = plan.sample_request[at]
            rows = rows[table.epoch[rows] == step.sample_epoch[at]]
            if not rows.size:
                continue
            first = int(rows[0])
            request, valid = table.choice(first).request, int(table.entered[first])
            if table.known[first] == table.prefill[first]:
                valid = int(table.taken[first])
                self._retract(first, valid, rows)
                if (valid or request.loaded) and not request.private:
                    request.private = True
                    for row in rows.tolist():
                        self._release.recompute(row, valid)
                    continue
            choices = [table.choice(int(row)) for row in rows]
            for choice in choices:
                self._release.fail(choice, NOT_FINITE, valid)
            rejected += choices
        return rejected

    def _retract(self, row: int, start: int, spared: Int32) -> None:
        """Take the KV of `row` from token `start` on out of the cache; those that took it, but `spared`, recompute."""
        state, table = self._state, self._state.table
        content = table.content(row, int(table.known[row]))
        takers = state.space.remove(table.choice(row).request.submit.salt, content, start, table.holding())
        for taker in np.setdiff1d(takers, spared).tolist():
            if table.choices[taker] is not None:  # no beam of a search that went back with another
                self._release.recompute(taker, start)

    def _uncached(self, step: InFlight) -> dict[int, int]:
        """Take what a step put into the cache out again; per running row that has any of it, where that begins."""
        state = self._state
        takers: dict[int, int] = {}
        for entered in step.entered:
            rows = state.space.remove(entered.salt, entered.content, entered.start, state.table.holding())
            _note_all(takers, {int(row): entered.start for row in rows})
        return takers


def _note_all(lost: dict[int, int], more: Mapping[int, int]) -> None:
    """A row is valid only up to the smallest position that any of these steps reports."""
    for row, valid in more.items():
        lost[row] = min(valid, lost.get(row, valid))
