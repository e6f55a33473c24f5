"""Release: a choice leaves its row because it ends, is preempted, or has to compute something again.

Failure isolation: a failed step, or a row that is not finite, ends only the requests that cause it.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Mapping

import numpy as np

from llmcore.api.protocols import Int32
from llmcore.sched.plan import InFlight, StepResult
from llmcore.sched.policy import StepView
from llmcore.sched.processors import CLIENTS_FAULT, Reason
from llmcore.sched.request import NO_ROW, RUNNING, Choice, RequestTable, State

logger = logging.getLogger(__name__)

TRIALS = 3
"""Failed steps after which a request that could never be tried alone, for want of room, ends with an error."""

NOT_FINITE: Reason = (
    "internal_error",
    "the model's output for this request was not finite, or not a token id; if many requests fail like this, check "
    "the weights for NaN and Inf (docs/operators.md, Errors, says how)",
)


class Release:
    """A choice that leaves offers what is valid of its KV to the prefix cache, then lets go of it."""

    def __init__(self, state: State) -> None:
        self._state = state

    def valid(self, row: int) -> int:
        """Tokens of `row` whose KV may be kept: those of steps that were read, and of its prompt what is there."""
        table = self._state.table
        return int(max(table.settled[row], table.entered[row]))

    def end(self, choice: Choice, valid: int | None = None) -> None:
        """The choice is done, wherever it stands; at most its first `valid` tokens stay in the prefix cache.

        With a beam, all other beams of its search are done.
        """
        for member in _together(choice):
            if member.row != NO_ROW:
                self._let_go(member.row, self.valid(member.row) if valid is None else valid)
            self._state.end(member)

    def fail(self, choice: Choice, error: Reason, valid: int | None = None) -> None:
        """`end` it, because of `error`: this is where such a request is counted, and named in the log."""
        if error[0] == CLIENTS_FAULT:
            logger.info("request %s asked for what cannot be done", choice.name)
        else:
            self._state.totals.failed_requests += 1
            cause = None if choice.processors is None else choice.processors.cause
            logger.error("request %s ended with an error: %s", choice.name, error[1], exc_info=cause)
        self.end(choice, valid)

    def unplace(self, choice: Choice) -> None:
        """The choice was given a row in this step and does not get to run; it never left the queue."""
        self._let_go(choice.row, self.valid(choice.row))
        self._state.table.end(choice.row)

    def preempt(self, row: int) -> None:
        """Preempt `row`: free its slots. Its choice goes back to the queue, now or when its last step was read."""
        table = self._state.table
        if row in table.beams:
            self._restart(table.choice(row), self.valid(row))
            return
        self._let_go(row, self.valid(row))
        if table.length[row] > table.known[row]:
            table.leave(row)
        else:
            self._state.preempt(row)

    def recompute(self, row: int, valid: int) -> None:
        """Back to the queue at once; of the KV only the first `valid` tokens, and of the tokens those read, count.

        A beam's search goes back as a whole, to its prompt: what it found so far is not kept.
        """
        choice = self._state.table.choice(row)
        if choice.request.beams is not None:
            self._restart(choice, valid)
            return
        self._let_go(row, min(valid, self.valid(row)))
        self._state.preempt(row)

    def _restart(self, choice: Choice, valid: int) -> None:
        for member in _together(choice):
            self._let_go(member.row, min(valid, self.valid(member.row)))
        self._state.restart(choice.request.choices[0])

    def _let_go(self, row: int, valid: int) -> None:
        state, table = self._state, self._state.table
        lease = table.leases.get(row)
        if lease is not None:
            lease.source.cancel(lease)
        elif table.status[row] != RUNNING:
            return
        salt = table.choice(row).request.submit.salt
        if valid < self.valid(row):
            # A twin may have put more of what it holds into the cache: pass by there too before letting go.
            state.space.match(salt, table.content(row, int(table.known[row])))
        state.space.release(row, salt, table.content(row, valid))


def victim(running: Int32, table: RequestTable) -> int:
    """The row to preempt, of `running`, oldest first: the newest of the lowest priority that is neither the oldest nor
    a beam of the oldest's search."""
    others, oldest = running[1:], table.beams.get(int(running[0])) if table.beams else None
    if oldest is not None:
        others = others[[table.beams.get(row) is not oldest for row in others.tolist()]]
    return int(others[np.argsort(table.priority[others], kind="stable")][-1])


def _together(choice: Choice) -> list[Choice]:
    """The choices that come and go with `choice`, itself included; none if it has ended already."""
    if choice.request.beams is not None:
        return list(choice.request.choices.values())
    return [] if choice.ended else [choice]


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
