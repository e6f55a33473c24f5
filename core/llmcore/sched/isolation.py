"""Failure isolation: a failed step, or a row that is not finite, ends only the requests that cause it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

import numpy as np

from llmcore.api.protocols import Int32
from llmcore.sched.plan import InFlight, StepResult
from llmcore.sched.processors import Reason
from llmcore.sched.request import Choice, State

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

    def __init__(self, state: State) -> None:
        self._state = state
        self._suspects: deque[Choice] = deque()

    def suspect(self) -> Choice | None:
        """The choice that is on trial."""
        while self._suspects and self._suspects[0].ended:
            self._suspects.popleft()
        return self._suspects[0] if self._suspects else None

    def passed(self, rows: Int32) -> None:
        """A step gave tokens to `rows`. If the suspect is one of them, it was not the cause."""
        suspect = self.suspect()
        # A search starts again from its prompt, so only its end shows that.
        if suspect is not None and suspect.row in rows and suspect.request.beams is None:
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
            rows = np.unique(np.append(step.plan.request, step.plan.sample_request))
            rows = rows[table.epoch[rows] == step.epochs[rows]]
            for row, valid in (*self._uncached(step), *zip(rows.tolist(), table.settled[rows].tolist(), strict=True)):
                lost[row] = min(valid, lost.get(row, valid))
            accused = [table.choice(row) for row in rows.tolist()]
        self._recompute(lost)
        tried = set(self._suspects)
        accused = [choice for choice in accused if not choice.ended]
        self._suspects = deque(sorted({*tried, *accused}, key=lambda choice: choice.arrival))
        return [choice for choice in accused if choice in tried or choice.untried >= TRIALS]

    def reject(self, step: InFlight, result: StepResult) -> list[tuple[Choice, Reason]]:
        """End the rows whose logits were not finite, the oldest first; returns their choices, each with the error.

        If it was a prompt's first sample, its KV is not to be trusted: it leaves the cache with all below it, and
        every request that took it computes again. A request that took or loaded KV gets a second chance without.
        """
        plan, table = step.plan, self._state.table
        bad = np.flatnonzero(~result.finite)
        rejected: list[tuple[Choice, Reason]] = []
        for source in plan.sample_row[bad[np.argsort(table.arrival[plan.sample_request[bad]])]]:
            rows = plan.sample_request[bad[plan.sample_row[bad] == source]]
            rows = rows[table.epoch[rows] == step.epochs[rows]]
            if not rows.size:
                continue
            first = int(rows[0])
            request, valid = table.choice(first).request, int(table.entered[first])
            if table.known[first] == table.prefill[first]:
                valid = int(table.taken[first])
                self._retract(first, valid, rows)
                if (valid or request.loaded) and not request.private:
                    request.private = True
                    self._recompute(dict.fromkeys(rows.tolist(), valid))
                    continue
            for choice in [table.choice(row) for row in rows.tolist()]:
                rejected.append((choice, NOT_FINITE))
                self._state.fail(choice, NOT_FINITE, valid)
        return rejected

    def _recompute(self, valid: dict[int, int]) -> None:
        """Send rows back. `valid`: row -> the number of its tokens whose KV is valid."""
        for row, tokens in valid.items():
            if self._state.table.choices[row] is not None:  # no beam of a search that went back with another
                self._state.preempt(row, tokens)

    def _retract(self, row: int, start: int, spared: Int32) -> None:
        """Take the KV of `row` from token `start` on out of the cache; those that took it, but `spared`, recompute."""
        table, salt = self._state.table, self._state.table.choice(row).request.submit.salt
        content = table.content(row, int(table.known[row]))
        takers = self._state.space.remove(salt, content, start, table.holding())
        self._recompute(dict.fromkeys(np.setdiff1d(takers, spared).tolist(), start))

    def _uncached(self, step: InFlight) -> Iterator[tuple[int, int]]:
        """Take what a step put into the cache out again. Each row that has any of it, and where that begins."""
        for salt, content, start in step.entered:
            for row in self._state.space.remove(salt, content, start, self._state.table.holding()):
                yield int(row), start
