"""What the results of a step do to the requests that were in it."""

from __future__ import annotations

import time

import numpy as np
from numpy.typing import NDArray

from llmcore.bridge import Finish, StepEvents
from llmcore.protocols import Int32
from llmcore.sched.departures import Departures
from llmcore.sched.events import Accepted, Reason, add_errors, by_owner
from llmcore.sched.flight import Flight
from llmcore.sched.job import Job
from llmcore.sched.plan import StepResult
from llmcore.sched.probes import note
from llmcore.sched.search import Searches
from llmcore.sched.state import State
from llmcore.sched.table import LEAVING

STOP, LENGTH = int(Finish.STOP), int(Finish.LENGTH)

NOT_FINITE = (
    "internal_error",
    "the model's output for this request was not finite, or not a token id; if many requests fail like this, check "
    "the weights for NaN and Inf (docs/operators.md, Errors, says how)",
)


class Results:
    """Counts tokens, ends who is done or broken, and gives those who left early back to the queue."""

    def __init__(self, state: State, departures: Departures) -> None:
        self._state = state
        self._departures = departures
        self._searches = Searches(state, departures)

    def take(self, flight: Flight, result: StepResult) -> tuple[Int32, dict[int, StepEvents]]:
        """The rows that a token was counted for, and the events of the step by owner."""
        plan, table = flight.plan, self._state.table
        stamp = time.monotonic()
        self._state.totals.steps += 1
        alive = table.epoch[plan.request] == flight.row_epoch
        table.settled[plan.request[alive]] = (plan.start + plan.n_query)[alive]
        if plan.probes or plan.pools:
            note(table, plan, alive, result)
        rejected = self._reject(flight, result) if not result.finite.all() else []
        at = np.flatnonzero((table.epoch[plan.sample_request] == flight.sample_epoch) & result.finite)
        if table.bound:
            at, ends, failed = self._tell(at, plan.sample_request[at], result.tokens[at])
        else:
            ends, failed = None, []
        beams = at[:0]
        if table.beams:
            searched = np.isin(plan.sample_request[at], list(table.beams))
            beams, at = at[searched], at[~searched]
            ends = None if ends is None else ends[~searched]
        rows = plan.sample_request[at]
        events = self._accept(rows, result.tokens[at], at, result, stamp, ends)
        if beams.size:
            self._searches.hear(plan.sample_request[beams], beams, result, events, stamp)
        add_errors(events, rejected, NOT_FINITE, stamp)
        for job, error in failed:
            add_errors(events, [job], error, stamp)
        return rows, events

    def _tell(
        self, at: NDArray[np.intp], rows: Int32, tokens: Int32
    ) -> tuple[NDArray[np.intp], NDArray[np.bool_], list[tuple[Job, Reason]]]:
        """Tell logits processors of their rows' tokens; end the rows of those that fail.

        Returns which of `at` are left, which of these end with their token, and (job, error) of the others.
        """
        table = self._state.table
        ends, fine = np.zeros(at.size, np.bool_), np.ones(at.size, np.bool_)
        failed = []
        for i, (row, token) in enumerate(zip(rows.tolist(), tokens.tolist(), strict=True)):
            bound = table.bound.get(row)
            if bound is None:
                continue
            if bound.error is None:
                ends[i] = bound.accept(token)
            if bound.error is not None:
                job = table.job(row)
                self._departures.fail(job, bound.error)
                failed.append((job, bound.error))
                fine[i] = False
        return at[fine], ends[fine], failed

    def _accept(
        self,
        rows: Int32,
        tokens: Int32,
        at: NDArray[np.intp],
        result: StepResult,
        stamp: float,
        ends: NDArray[np.bool_] | None,
    ) -> dict[int, StepEvents]:
        table = self._state.table
        known = table.known[rows]
        table.tokens[rows, known] = tokens
        table.settled[rows] = known
        table.known[rows] = known + 1
        produced = known + 1 - table.prompt_len[rows]
        stops = (table.stops[rows] == tokens[:, None]).any(axis=1)
        for i in np.flatnonzero(table.many_stops[rows]):
            stops[i] = int(tokens[i]) in table.job(int(rows[i])).submit.stop_ids
        stops &= produced > table.min_new[rows]
        stops |= result.scores is not None
        if ends is not None:
            stops |= ends
        finish = np.where(produced >= table.max_new[rows], LENGTH, 0).astype(np.int32)
        finish[stops] = STOP
        self._state.totals.output_tokens += rows.size if result.scores is None else 0
        events = by_owner(Accepted(rows, tokens, finish, at), table, result, stamp)
        if result.pooled is not None:
            self._state.totals.output_tokens -= sum(len(mine.pooled) for mine in events.values())
        for i in np.flatnonzero(finish):
            self._state.estimator.observe(int(produced[i]))
            self._departures.end(table.job(int(rows[i])))
        left = (table.status[rows] == LEAVING) & (table.known[rows] == table.length[rows])
        for row in rows[left].tolist():
            self._departures.give_back(row)
        return events

    def _reject(self, flight: Flight, result: StepResult) -> list[Job]:
        """End the rows whose logits were not finite, the oldest first; returns their jobs.

        Where it is a prompt's first sample, its KV is not to be trusted: it leaves the cache with all below, and
        whoever took it computes again. A request that took KV itself gets a second chance without.
        """
        plan, table = flight.plan, self._state.table
        bad = np.flatnonzero(~result.finite)
        rejected: list[Job] = []
        for source in plan.sample_row[bad[np.argsort(table.arrival[plan.sample_request[bad]])]]:
            at = bad[plan.sample_row[bad] == source]
            rows = plan.sample_request[at]
            rows = rows[table.epoch[rows] == flight.sample_epoch[at]]
            if not rows.size:
                continue
            first = int(rows[0])
            valid = int(table.entered[first])
            if table.known[first] == table.prefill[first]:
                valid = int(table.taken[first])
                self._retract(first, valid, rows)
                if valid and not table.job(first).private:
                    for row in rows.tolist():
                        table.job(row).private = True
                        self._departures.recompute(row, valid)
                    continue
            jobs = [table.job(int(row)) for row in rows]
            for job in jobs:
                self._departures.fail(job, NOT_FINITE, valid)
            rejected += jobs
        return rejected

    def _retract(self, row: int, start: int, spared: Int32) -> None:
        state, table = self._state, self._state.table
        content = table.content(row, int(table.known[row]))
        takers = state.space.remove(table.job(row).submit.salt, content, start, table.running())
        for taker in np.setdiff1d(takers, spared).tolist():
            if table.jobs[taker] is not None:  # no beam of a search that went back with another
                self._departures.recompute(taker, start)
