"""Running requests as columns: steady decoding touches nothing else."""

from __future__ import annotations

import numpy as np

from llmcore.protocols import Int32, Int64
from llmcore.sched.beams import Beams
from llmcore.sched.bound import Bound
from llmcore.sched.job import NO_ROW, Job

STOP_COLUMNS = 8
"""Stop ids compared at once; a request with more is looked up one by one."""

NO_TOKEN = -1


FREE, RESERVED, RUNNING, LEAVING = range(4)
"""What a place among the running is used for: RESERVED for a fork that does not run yet; who is LEAVING was sent back
to the queue, but its last step has not been read. Plain numbers, because steady decoding looks at them."""


class RequestTable:
    """Columns over the places of running requests; counts are tokens of the sequence unless said otherwise.

    `length`: all tokens, those sampled but not read yet included. `known`: those on the host. `computed`: those whose
    KV is written or enqueued; `settled`: whose step was read. `prefill`: those known when it was admitted. `limit`:
    most that will ever be computed. `taken`: those that came from the cache. `entered`: those whose KV is in the
    cache by its doing or another's. `epoch` changes whenever a place is given up, so that late results find no one.
    """

    def __init__(self, rows: int, max_len: int) -> None:
        self.tokens = np.zeros((rows, max_len), np.int32)
        self.status = np.zeros(rows, np.int8)
        self.epoch = np.zeros(rows, np.int64)
        self.arrival = np.zeros(rows, np.int64)
        self.priority = np.zeros(rows, np.int64)
        self.owner = np.zeros(rows, np.int32)
        self.request = np.zeros(rows, np.int64)
        self.choice = np.zeros(rows, np.int32)
        self.prompt_len = np.zeros(rows, np.int32)
        self.prefill = np.zeros(rows, np.int32)
        self.length = np.zeros(rows, np.int32)
        self.known = np.zeros(rows, np.int32)
        self.computed = np.zeros(rows, np.int32)
        self.settled = np.zeros(rows, np.int32)
        self.limit = np.zeros(rows, np.int32)
        self.taken = np.zeros(rows, np.int32)
        self.entered = np.zeros(rows, np.int32)
        self.max_new = np.zeros(rows, np.int32)
        self.min_new = np.zeros(rows, np.int32)
        self.stops = np.full((rows, STOP_COLUMNS), NO_TOKEN, np.int32)
        self.no_stop = np.zeros(rows, np.bool_)
        self.many_stops = np.zeros(rows, np.bool_)
        self.tops = np.full(rows, -1, np.int32)
        """Best log-probabilities asked for; -1: none, not even the drawn token's."""
        self.foreseen = np.zeros(rows, np.int32)
        """Tokens the estimator last expected it to produce in all."""
        self.forks = np.zeros(rows, np.int32)
        self.bound: dict[int, Bound] = {}
        """Rows with logits processors."""
        self.beams: dict[int, Beams] = {}
        """Rows that are beams of a search."""
        self.renewed: dict[int, bool] = {}
        """Rows whose tokens the device does not know, and whether their table row is new as well."""
        self.probing: set[int] = set()
        """Rows of whose prompt log-probabilities or hidden states are wanted."""
        self.jobs: list[Job | None] = [None] * rows
        self._free = list(range(rows - 1, -1, -1))
        self._running: Int32 | None = None

    @property
    def places(self) -> int:
        """Places that nobody has."""
        return len(self._free)

    def peek(self, n: int) -> Int32:
        """The places that the next request of `n` choices will take."""
        return np.array(self._free[: -n - 1 : -1], np.int32)

    def running(self) -> Int32:
        """Running rows, oldest first."""
        if self._running is None:
            rows = np.flatnonzero(self.status == RUNNING)
            self._running = rows[np.argsort(self.arrival[rows])].astype(np.int32)
        return self._running

    def job(self, row: int) -> Job:
        """The job that has `row`."""
        job = self.jobs[row]
        assert job is not None
        return job

    def place(self, job: Job, cached: int) -> None:
        """Give `job` and its forks their places; `cached` of its tokens are in KV already."""
        row = self._free.pop()
        job.row = row
        job.reserved = [self._free.pop() for _ in range(job.forks)]
        self.status[job.reserved] = RESERVED
        self._describe(row, job)
        self.tokens[row, : job.size] = job.tokens()
        self.prefill[row] = self.length[row] = self.known[row] = job.size
        self.computed[row] = self.settled[row] = self.taken[row] = self.entered[row] = cached
        self.forks[row] = job.forks

    def fork(self, row: int, twin: Job) -> None:
        """Let `twin` run in its reserved place with the prompt of `row`, whose last tokens are being computed."""
        at = twin.row
        self._describe(at, twin)
        self.copy(row, at)
        self.foreseen[at] = self.foreseen[row]
        self.forks[at] = 0

    def copy(self, row: int, at: int) -> None:
        """Let what is in place `at` have the tokens of `row` as far as they are computed, and its counts."""
        size = int(self.computed[row])
        self.tokens[at, :size] = self.tokens[row, :size]
        for column in (self.prefill, self.length, self.known, self.computed, self.settled, self.taken, self.entered):
            column[at] = column[row]

    def leave(self, row: int) -> None:
        """The job goes back to the queue once its last step was read."""
        self.status[row] = LEAVING
        self._running = None

    def free(self, row: int) -> None:
        """Give up a place and those reserved for the job's forks; results on their way are dropped."""
        job = self.job(row)
        for place in (*job.reserved[::-1], row):
            self.status[place] = FREE
            self.epoch[place] += 1
            self.jobs[place] = None
            self.bound.pop(place, None)
            self.beams.pop(place, None)
            self.renewed.pop(place, None)
            self.probing.discard(place)
            self._free.append(place)
        job.reserved = []
        job.row = NO_ROW
        self._running = None

    def content(self, row: int, tokens: int) -> Int64:
        """Content ids of a row's first `tokens` tokens."""
        return self.tokens[row, :tokens].astype(np.int64)

    def _describe(self, row: int, job: Job) -> None:
        submit = job.submit
        self.jobs[row] = job
        if job.bound is not None:
            self.bound[row] = job.bound
        if job.beams is not None:
            self.beams[row] = job.beams
        if job.prompt_logprobs is not None or submit.pool:
            self.probing.add(row)
        self.status[row] = RUNNING
        self.arrival[row] = job.arrival
        self.priority[row] = submit.priority
        self.owner[row] = job.owner
        self.request[row] = submit.id
        self.choice[row] = job.choice
        self.prompt_len[row] = job.prompt.size
        self.max_new[row] = submit.max_new_tokens
        self.min_new[row] = submit.min_new_tokens
        self.limit[row] = job.prompt.size + submit.max_new_tokens - 1
        self.stops[row] = NO_TOKEN
        self.stops[row, : len(submit.stop_ids)] = submit.stop_ids[:STOP_COLUMNS]
        self.no_stop[row] = not submit.stop_ids
        self.many_stops[row] = len(submit.stop_ids) > STOP_COLUMNS
        self.tops[row] = -1 if submit.sampling.logprobs is None else submit.sampling.logprobs
        self._running = None
