"""How requests leave their places: they end, go back to the queue, or have to compute something again."""

from __future__ import annotations

import logging

from llmcore.sched.bound import CLIENTS_FAULT
from llmcore.sched.events import Reason
from llmcore.sched.job import NO_ROW, Job
from llmcore.sched.state import State
from llmcore.sched.table import RUNNING

logger = logging.getLogger(__name__)


class Departures:
    """Whoever leaves offers what is valid of its KV to the cache, then lets go of it."""

    def __init__(self, state: State) -> None:
        self._state = state

    def valid(self, row: int) -> int:
        """Tokens of `row` whose KV may be kept: those of steps that were read, and of its prompt what is there."""
        table = self._state.table
        return int(max(table.settled[row], table.entered[row]))

    def end(self, job: Job, valid: int | None = None) -> None:
        """The job is done, wherever it stands; at most its first `valid` tokens stay in the cache.

        With a beam all others of its search are done.
        """
        for member in self._together(job):
            self._end(member, valid)

    def fail(self, job: Job, error: Reason, valid: int | None = None) -> None:
        """`end` it, because of `error`: this is where such a request is counted, and named in the log."""
        if error[0] == CLIENTS_FAULT:
            logger.info("request %s asked for what cannot be done", job.name)
        else:
            self._state.totals.failed_requests += 1
            cause = None if job.bound is None else job.bound.cause
            logger.error("request %s ended with an error: %s", job.name, error[1], exc_info=cause)
        self.end(job, valid)

    def _together(self, job: Job) -> list[Job]:
        """Who comes and goes with `job`, itself included; nobody if it is gone already."""
        if job.beams is None:
            return [] if job.ended else [job]
        return list(self._state.requests.get((job.owner, job.submit.id), {}).values())

    def _end(self, job: Job, valid: int | None) -> None:
        state = self._state
        if job.row == NO_ROW:
            state.queue.remove(job)
        else:
            row = job.row
            self._let_go(row, self.valid(row) if valid is None else valid)
            state.table.free(row)
        job.ended = True
        if job.bound is not None:
            job.bound.ended = True
        key = (job.owner, job.submit.id)
        del state.requests[key][job.choice]
        if not state.requests[key]:
            del state.requests[key]

    def unplace(self, job: Job) -> None:
        """The job was given a place in this step and does not get to run; it never left the queue."""
        self._let_go(job.row, self.valid(job.row))
        self._state.table.free(job.row)

    def preempt(self, row: int) -> None:
        """Free the slots of `row`; it goes back to the queue, now or when its last step was read."""
        table = self._state.table
        if row in table.beams:
            self._restart(table.job(row), self.valid(row))
            return
        self._let_go(row, self.valid(row))
        if table.length[row] > table.known[row]:
            table.leave(row)
        else:
            self.give_back(row)

    def recompute(self, row: int, valid: int) -> None:
        """Back to the queue at once; of the KV only the first `valid` tokens, and of the tokens those read, count.

        A beam's search goes back as a whole, to its prompt: what it found so far is not kept.
        """
        job = self._state.table.job(row)
        if job.beams is not None:
            self._restart(job, valid)
            return
        self._let_go(row, min(valid, self.valid(row)))
        self.give_back(row)

    def _restart(self, job: Job, valid: int) -> None:
        state = self._state
        first, *others = self._together(job)
        for member in (first, *others):
            row = member.row
            self._let_go(row, min(valid, self.valid(row)))
            state.table.free(row)
        for member in others:
            member.ended = True
            del state.requests[job.owner, job.submit.id][member.choice]
        assert first.beams is not None
        first.beams.restart()
        first.forks = first.beams.width - 1
        first.queued_at = state.step
        state.queue.give_back(first)

    def give_back(self, row: int) -> None:
        """`row`, which holds nothing any more, goes back to the queue with the tokens that are known."""
        state = self._state
        job = state.table.job(row)
        job.produced = state.table.tokens[row, job.prompt.size : state.table.known[row]].copy()
        job.queued_at = state.step
        state.table.free(row)
        state.queue.give_back(job)

    def _let_go(self, row: int, valid: int) -> None:
        state, table = self._state, self._state.table
        if table.status[row] != RUNNING:
            return
        salt = table.job(row).submit.salt
        if valid < self.valid(row):
            # A twin may have put more of what it holds into the cache: pass by there too before letting go.
            state.space.match(salt, table.content(row, int(table.known[row])))
        state.space.release(row, salt, table.content(row, valid))
