"""Release: a choice leaves its row because it ends, is preempted, or has to compute something again."""

from __future__ import annotations

import logging

import numpy as np

from llmcore.api.protocols import Int32
from llmcore.sched.processors import CLIENTS_FAULT, Reason
from llmcore.sched.request import NO_ROW, RUNNING, Choice, RequestTable, State

logger = logging.getLogger(__name__)


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
