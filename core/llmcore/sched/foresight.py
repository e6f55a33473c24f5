"""The future peak of what runs, and what one more request would make of it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from llmcore.kv.group import KVGroup
from llmcore.kv.space import Hit
from llmcore.protocols import Int32, SchedulerLimits
from llmcore.sched.job import Job
from llmcore.sched.peak import FuturePeak
from llmcore.sched.state import State


@dataclass(frozen=True)
class Pace:
    """How many steps a prompt takes at most: `factor` for every `tokens` tokens, after the prompts before it."""

    tokens: int
    factor: int

    @staticmethod
    def of(limits: SchedulerLimits, granule: int) -> Pace:
        """Chunks share a step with every other running request's decode row; a whole prompt may wait a step."""
        if not limits.chunked:
            return Pace(limits.batch_tokens, 2)
        left = min(limits.batch_tokens - (limits.max_running - 1), limits.stall_tokens or limits.batch_tokens)
        return Pace(max(min(limits.chunk_tokens, left) // granule * granule, granule), 1)

    def steps(self, tokens: Int32) -> Int32:
        """Steps until each of several prompts, computed one after the other, is done."""
        steps: Int32 = np.cumsum(self.factor * -(-tokens // self.tokens)).astype(np.int32)
        return steps


class Lengths:
    """How long answers are expected to be, at one moment."""

    def __init__(self, state: State) -> None:
        self._estimator = state.estimator
        self._used = max(group.pool.live / group.pool.total for group in state.space.groups)

    def totals(self, produced: Int32, max_new: Int32, ignore_eos: NDArray[np.bool_]) -> Int32:
        """Tokens in all of requests that have `produced` so many."""
        totals = self._estimator.totals(produced, max_new, ignore_eos, self._used)
        clipped: Int32 = np.minimum(np.maximum(totals, np.minimum(produced + 1, max_new)), max_new)
        return clipped

    def of(self, job: Job) -> int:
        """Tokens in all of one that does not run."""
        submit = job.submit
        produced, max_new = np.array([[job.produced.size], [submit.max_new_tokens]], np.int32)
        return int(self.totals(produced, max_new, np.array([not submit.stop_ids]))[0])


class Foresight:
    """Sees ahead from one moment: `fits` adds a request to what runs if the peak allows it in every group.

    A request holds the slots of its prompt at once (they will be needed), then one more a step from the end of its
    prompt on, and gives them back `ahead` steps after its last one.
    """

    def __init__(self, state: State, *, ask: bool = True) -> None:
        """`ask`: ask the estimator about all that runs; otherwise its last answers are used."""
        table, space = state.table, state.space
        self._table = table
        self._space = space
        self._pace = Pace.of(state.limits, space.granule)
        self._ahead = state.ahead
        self._lengths = Lengths(state)
        rows = table.running()
        if ask and rows.size:
            produced = table.length[rows] - table.prompt_len[rows]
            table.foreseen[rows] = self._lengths.totals(produced, table.max_new[rows], table.no_stop[rows])
        rest = table.length[rows] - table.computed[rows]
        prompts = table.computed[rows] < table.prefill[rows]
        steps = np.ones(rows.size, np.int32)
        steps[prompts] = self._pace.steps(rest[prompts])
        self._queue_steps = int(steps[prompts][-1]) if prompts.any() else 0
        produced = table.length[rows] - table.prompt_len[rows]
        foreseen = np.maximum(table.foreseen[rows], np.minimum(produced + 1, table.max_new[rows]))
        growth = np.maximum(steps + table.prompt_len[rows] + foreseen - 1 - table.length[rows], 0) + self._ahead
        self._peaks = [self._peak_of(group, rows, growth) for group in space.groups]

    @property
    def peak(self) -> int:
        """The future peak of the first group, in tokens."""
        return self._peaks[0].peak * self._space.groups[0].granule

    def fits(self, job: Job, hit: Hit) -> bool:
        """Whether `job`, started with `hit`, fits; if so it counts from now on, in the places it will get next."""
        foreseen = self._lengths.of(job)
        rest = np.array([job.size - hit.tokens], np.int32)
        steps = self._queue_steps + int(self._pace.steps(rest)[0])
        growth = steps + job.prompt.size + foreseen - 1 - job.size + self._ahead
        rows = self._table.peek(job.choices)
        peaks = []
        for group, peak, granules in zip(self._space.groups, self._peaks, hit.granules, strict=True):
            own = np.full(rows.size, int(job.size % group.granule > 0), np.int32)
            own[0] = group.granules(job.size - 1) - int(np.count_nonzero(group.pool.in_use(granules)))
            owners = group.sharing.owners(group.sharing.newly_shared(granules))
            peak = peak.share(owners).add(rows, own, group.granules(growth))
            if peak.peak > group.pool.total:
                return False
            peaks.append(peak)
        self._peaks = peaks
        self._queue_steps = steps
        self._table.foreseen[rows[0]] = foreseen
        return True

    def _peak_of(self, group: KVGroup, rows: Int32, growth: Int32) -> FuturePeak:
        table = self._table
        own = group.granules_of(table.length[rows] - 1) - group.sharing.per_row[rows]
        own += self._space.pending_copies(group, rows, table.computed[rows])
        steps = group.granules_of(growth)
        forking = np.flatnonzero(table.forks[rows])
        if forking.size:
            places = np.concatenate([table.job(int(rows[i])).reserved for i in forking]).astype(np.int32)
            counts = table.forks[rows[forking]]
            partial = (table.prompt_len[rows[forking]] % group.granule > 0).astype(np.int32)
            own = np.concatenate([own, np.repeat(partial, counts)])
            steps = np.concatenate([steps, np.repeat(steps[forking], counts)])
            rows = np.concatenate([rows, places])
        return FuturePeak.of(rows, own.astype(np.int32), steps.astype(np.int32), group.sharing.total)
