"""What a policy sees of one step; asking it whether a candidate fits gives the candidate a place."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from llmcore.kv.space import Hit, KVSpace
from llmcore.protocols import Int32, Int64, RequestInfo, WaitingRequest
from llmcore.sched.foresight import Foresight, Lengths
from llmcore.sched.job import NO_ROW, Job, WaitingQueue
from llmcore.sched.state import State
from llmcore.sched.table import RESERVED, RUNNING, RequestTable

WORTH_WAITING = 64
"""Tokens that another request is about to compute for which a candidate waits; or half of its own."""

CROWD = 16
"""Prompts that may wait before they get more of a step than `limits.stall_tokens`; beyond that their share grows in
proportion. A crowd of prompts waits longer than any answer, and is computed fastest in large steps."""


class Frontier:
    """Where running prompts are about to be computed, so that nobody computes the same beside them."""

    def __init__(self, table: RequestTable, space: KVSpace) -> None:
        self._table = table
        self._space = space
        self._rows: dict[tuple[bytes, int, int, bytes], int] = {}
        rows = table.running()
        for row in rows[table.computed[rows] < table.prefill[rows]] if space.caching else ():
            self.add(int(row))

    def add(self, row: int) -> None:
        """`row` goes on computing its prompt; what it computed so far is in the cache."""
        at = self._space.floor(int(self._table.computed[row]))
        if self._space.caching and at <= self._table.entered[row]:
            last = int(self._space.groups[0].table[row, at // self._space.groups[0].granule - 1]) if at else -1
            content = self._table.tokens[row, at : int(self._table.prefill[row])].astype(np.int64)
            salt = self._table.job(row).submit.salt
            self._rows.setdefault((salt, at, last, content[: self._space.granule].tobytes()), row)

    def ahead_of(self, job: Job, content: Int64, hit: Hit) -> tuple[int, int, int] | None:
        """(row, its epoch, tokens) to wait for, if another's next tokens are enough of what `job` would compute."""
        at = hit.tokens
        if not self._rows:
            return None
        last = int(hit.granules[0][-1]) if at else -1
        row = self._rows.get((job.submit.salt, at, last, content[at : at + self._space.granule].tobytes()))
        if row is None:
            return None
        theirs = self._table.tokens[row, at : int(self._table.prefill[row])]
        ours = content[at : at + theirs.size]
        differs = np.flatnonzero(ours != theirs[: ours.size])
        same = self._space.floor(int(differs[0]) if differs.size else ours.size)
        if same < min(WORTH_WAITING, -(-(content.size - at) // 2)):
            return None
        return row, int(self._table.epoch[row]), at + same


class StepView:
    """One step as a policy sees it (protocols.SchedulerView); `placed` are the candidates found to fit, in order."""

    def __init__(self, state: State, running: Int32, queue: WaitingQueue | Sequence[Job], *, admit: bool) -> None:
        limits, table = state.limits, state.table
        self.budget = limits.batch_tokens
        self.chunk = limits.chunk_tokens if limits.chunked else limits.batch_tokens
        self.whole = not limits.chunked
        self.admit = admit
        rest = np.minimum(table.length[running], table.limit[running]) - table.computed[running]
        able = rest > 0
        self.running = running[able]
        self.remaining = rest[able]
        self.prompt_budget = _prompt_budget(state, len(queue))
        self.offers: list[tuple[Job, Hit]] = []
        """What was offered; a WaitingRequest's index points here."""
        self.placed: list[Job] = []
        """Those found to fit, in order; they have places and hold their hits."""
        self._state = state
        self._queue = queue
        self._waits: dict[tuple[int, int, int], bool] = {}
        self._foresight: Foresight | None = None
        self._frontier: Frontier | None = None

    def info(self, index: int) -> RequestInfo:
        """The wishes of a running request."""
        return self._state.table.job(index).info

    def waiting(self, order: Callable[[RequestInfo], Any] | None = None) -> Iterator[WaitingRequest]:
        """The queue from its head, or by `order`, lowest first; prefix hits are looked up as it is read."""
        state = self._state
        if not state.table.places:
            return
        queue = self._queue if order is None else sorted(self._queue, key=lambda job: order(job.info))
        if self._frontier is None:
            self._frontier = Frontier(state.table, state.space)
        for job in queue:
            if state.table.places < job.choices:
                return
            if job.row != NO_ROW or not job.ready or self._waiting_for_another(job):
                continue
            content = job.content()[: job.size - 1]
            hit = state.space.match(job.submit.salt, content[:0] if job.private else content)
            job.waits = None if job.private else self._frontier.ahead_of(job, content, hit)
            if job.waits is not None:
                continue
            self.offers.append((job, hit))
            yield WaitingRequest(
                index=len(self.offers) - 1,
                tokens=job.size,
                cached=hit.tokens,
                max_new=job.submit.max_new_tokens - job.produced.size,
                choices=job.choices,
                waited=state.step - job.queued_at,
                info=job.info,
            )

    def fits(self, candidate: WaitingRequest) -> bool:
        """Whether the future peak allows `candidate`; what runs alone always fits."""
        state, table = self._state, self._state.table
        job, hit = self.offers[candidate.index]
        if job.row != NO_ROW:
            return True
        if table.places < job.choices:
            return False
        if not (table.status > RESERVED).any():
            # What is alone always fits: that it can be served was checked when it came.
            table.foreseen[table.peek(1)] = Lengths(state).of(job)
        else:
            if self._foresight is None:
                self._foresight = Foresight(state)
            if not self._foresight.fits(job, hit):
                return False
        table.place(job, hit.tokens)
        if hit.tokens:
            state.space.take(job.row, hit)
        self.placed.append(job)
        if self._frontier is not None:
            self._frontier.add(job.row)
        return True

    def _waiting_for_another(self, job: Job) -> bool:
        if job.waits is None:
            return False
        if job.waits not in self._waits:
            row, epoch, tokens = job.waits
            table = self._state.table
            computing = table.epoch[row] == epoch and table.status[row] == RUNNING
            self._waits[job.waits] = bool(computing and table.computed[row] < tokens)
        return self._waits[job.waits]


def _prompt_budget(state: State, waiting: int) -> int:
    """Tokens of prompts for the next step; `waiting` requests are in the queue. Answers in progress limit them."""
    limits, table = state.limits, state.table
    if not (limits.stall_tokens and limits.chunked):
        return limits.batch_tokens
    rows = table.running()
    prompts = int(np.count_nonzero(table.length[rows] - table.computed[rows] > 1))
    if prompts == rows.size:
        return limits.batch_tokens
    return min(limits.batch_tokens, limits.stall_tokens * max(CROWD, prompts + waiting) // CROWD)
