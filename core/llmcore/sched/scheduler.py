"""The scheduler's mechanism: requests in, plans out, results in, events out. Policy is somebody else's.

It never waits and never looks at a device. With steps in flight, lengths are what they will be once those were read;
places and slots of whoever ends are free at once, because steps run in the order in which they were planned, and a
result for someone who is gone finds a new epoch at his place and is dropped.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Mapping, Sequence

import numpy as np

from llmcore.bridge import Load, StepEvents, Submit
from llmcore.counters import TALLIES
from llmcore.errors import RequestError, reraise_if_stopping, text_of
from llmcore.kv.group import KVGroup
from llmcore.kv.space import KVSpace
from llmcore.protocols import Decision, Int32, LengthEstimator, SchedulerLimits, SchedulerPolicy
from llmcore.sched.bound import Bound
from llmcore.sched.crowd import Crowd, crowd, expire
from llmcore.sched.departures import Departures
from llmcore.sched.events import Reason, add_errors
from llmcore.sched.flight import Flight, enqueue
from llmcore.sched.foresight import Foresight
from llmcore.sched.job import NO_ROW, Job, new_job
from llmcore.sched.limits import check_submit, fitting
from llmcore.sched.plan import StepPlan, StepResult
from llmcore.sched.results import Results
from llmcore.sched.search import outrun, victim
from llmcore.sched.state import State, Totals
from llmcore.sched.table import RESERVED, RUNNING, RequestTable
from llmcore.sched.trials import Trials
from llmcore.sched.validate import PATIENCE, fault, oldest_first
from llmcore.sched.view import StepView

log = logging.getLogger(__name__)

NOBODY = -1
"""No epoch: a result for whom nobody waits."""


class Scheduler:
    """Requests of several owners (HTTP workers) on one engine; used by one thread.

    `plan` makes the next step; `commit` takes the results of the oldest one not read yet. Up to `ahead` plans may be
    made before a commit. `priorities`: the policy heeds those of requests. Raises ConfigError where `limits`
    contradict each other or the groups.
    """

    def __init__(
        self,
        limits: SchedulerLimits,
        groups: Sequence[KVGroup],
        policy: SchedulerPolicy,
        estimator: LengthEstimator,
        *,
        ahead: int = 0,
        priorities: bool = False,
    ) -> None:
        space = KVSpace(groups)
        limits = fitting(limits, space)
        self._state = State(limits, RequestTable(limits.max_running, limits.max_total_len), space, estimator, ahead)
        self._policy = policy
        self._priorities = priorities
        self._departures = Departures(self._state)
        self._results = Results(self._state, self._departures)
        self._flights: deque[Flight] = deque()
        self._trials = Trials(self._state, self._departures)
        self._arrivals = 0
        self._last_join = -limits.wait_steps
        self._passed_over = 0
        self._distrusted = False

    @property
    def idle(self) -> bool:
        """Nothing waits, runs or is on its way."""
        return not self._state.requests and not self._flights

    @property
    def totals(self) -> Totals:
        """What was done since the start."""
        return self._state.totals

    @property
    def limits(self) -> SchedulerLimits:
        """The limits, cut to what fits together."""
        return self._state.limits

    @property
    def space(self) -> KVSpace:
        """The KV groups, for figures and checks."""
        return self._state.space

    # --- what the front end asks for ---------------------------------------------------------------------------

    def submit(self, submit: Submit, owner: int, bounds: Sequence[Bound] = ()) -> None:
        """Queue a request; `bounds`: its processors by choice. Raises RequestError if it can never be served."""
        self.check(submit, owner)
        state = self._state
        job = new_job(submit, owner, self._arrivals)
        job.queued_at, job.bounds = state.step, bounds
        self._arrivals += job.choices
        state.requests[owner, submit.id] = {0: job}
        state.queue.append(job)

    def check(self, submit: Submit, owner: int) -> None:
        """Raise RequestError if it can never be served."""
        state = self._state
        if (owner, submit.id) in state.requests:
            raise RequestError(f"request {submit.id} exists already", code="invalid_value")
        if submit.priority and not self._priorities:
            raise RequestError(
                "priority: the scheduler of this server does not heed it; leave it out, or start the server with "
                "--scheduler priority",
                param="priority",
                code="unsupported_parameter",
            )
        check_submit(submit, state.limits, state.space, guaranteed=state.estimator.guaranteed)

    def abort(self, owner: int, request_id: int) -> None:
        """End every choice of a request, without events; its slots are free at once. Unknown ids are ignored."""
        jobs = self._state.requests.get((owner, request_id), {})
        self.totals.aborts += bool(jobs)
        for job in list(jobs.values()):
            self._departures.end(job)

    def finish(self, owner: int, request_id: int, choice: int, n_tokens: int) -> None:
        """End one choice, without events, as if it had produced only its first `n_tokens` tokens."""
        job = self._state.requests.get((owner, request_id), {}).get(choice)
        if job is None:
            return
        valid = None
        if job.row != NO_ROW:
            # What it took from the cache or entered stays there, whatever the front end made of it.
            table, row = self._state.table, job.row
            valid = min(self._departures.valid(row), max(job.prompt.size + n_tokens, int(table.entered[row])))
        self._state.estimator.observe(n_tokens)
        self._departures.end(job, valid)

    def crowd(self) -> Crowd:
        """Who waits, and what there is room for."""
        return crowd(self._state)

    def expire(self, before: float, error: tuple[str, str]) -> dict[int, StepEvents]:
        """End with `error` who was received before that time and never ran. Returns errors by owner, as events."""
        return expire(self._state, self._departures, before, error)

    def who(self, index: int) -> tuple[int, int]:
        """(owner, request id) of the request that has `index` in plans; ids as submitted."""
        job = self._state.table.job(index)
        return job.owner, job.submit.id

    def load(self) -> Load:
        """A snapshot: requests, the first group's slots in tokens, the future peak as last foreseen, and totals."""
        state = self._state
        group = state.space.groups[0]
        running = int(np.count_nonzero(state.table.status > RESERVED))
        return Load(
            running=running,
            waiting=len(state.queue),
            waiting_tokens=state.queue.tokens,
            kv_live=group.pool.live * group.granule,
            kv_cached=group.pool.cached * group.granule,
            kv_free=group.pool.free * group.granule,
            kv_total=group.pool.total * group.granule,
            peak=Foresight(state, ask=False).peak,
            steps=self.totals.steps,
            prompt_tokens=self.totals.prompt_tokens,
            cached_tokens=self.totals.cached_tokens,
            output_tokens=self.totals.output_tokens,
            preemptions=self.totals.preemptions,
            aborts=self.totals.aborts,
            failed_steps=self.totals.failed_steps,
            failed_requests=self.totals.failed_requests,
            cache=dict(group.manager.stats()),
        )

    # --- a step ------------------------------------------------------------------------------------------------

    def plan(self) -> StepPlan | None:
        """The next step, which counts as enqueued from now on; None if nothing can run (before a commit)."""
        plan = self._plan()
        if plan is None and not self._flights and self._trials.suspect() is not None:
            self._trials.dismiss()
            plan = self._plan()
        return plan

    def commit(self, plan: StepPlan, result: StepResult) -> dict[int, StepEvents]:
        """Take a step's results; plans are committed in the order they were made. Returns events by owner."""
        if not self._flights or self._flights[0].plan is not plan:
            raise ValueError("plans are committed once, in the order in which they were made")
        suspect = self._trials.suspect()
        tried = NO_ROW if suspect is None else suspect.row
        rows, events = self._results.take(self._flights.popleft(), result)
        if tried in rows:
            self._trials.passed()
        return events

    def postpone(self, plan: StepPlan, late: Sequence[int]) -> None:
        """The requests `late`, in rows of one token of the newest plan, get none from it: their next rows repeat it.

        Call it before the next plan is made.
        """
        flight, table = self._flights[-1], self._state.table
        if flight.plan is not plan:
            raise ValueError("only the newest plan's tokens can be postponed")
        for request in late:
            (row,), (sample,) = np.flatnonzero(plan.request == request), np.flatnonzero(plan.sample_request == request)
            if table.epoch[request] == flight.row_epoch[row]:
                self.totals.late_masks += 1
                table.length[request] -= 1
                table.computed[request] -= 1
            flight.row_epoch[row] = flight.sample_epoch[sample] = NOBODY

    def expel(self, plan: StepPlan, errors: Mapping[int, Reason]) -> dict[int, StepEvents]:
        """The requests `errors` of the newest plan end, each with its error. Returns errors by owner, as events."""
        flight, table = self._flights[-1], self._state.table
        events: dict[int, StepEvents] = {}
        for request, error in errors.items():
            at = int(np.flatnonzero(plan.sample_request == request)[0])
            if table.epoch[request] == flight.sample_epoch[at]:
                self._fail(table.job(request), error, events)
        return events

    def give_up(self) -> dict[int, StepEvents]:
        """End requests whose logits processors never answer. Returns errors by owner, as events."""
        events: dict[int, StepEvents] = {}
        now = time.monotonic()
        jobs = [job for choices in self._state.requests.values() for job in choices.values() if job.bounds]
        for job in jobs:
            bounds = job.bounds[job.choice : job.choice + job.choices]
            late = [bound.error for bound in bounds if bound.overdue(now) and bound.error is not None]
            if late:
                self._fail(job, late[0], events)
        return events

    def fail(self, plan: StepPlan, error: Reason) -> dict[int, StepEvents]:
        """The step of `plan` failed and it and all after it were discarded. Returns errors by owner, as events.

        Everyone in it computes again, each alone until it has produced a token; who fails then ends with `error`.
        """
        discarded = []
        while self._flights and self._flights[-1].plan.number >= plan.number:
            discarded.append(self._flights.pop())
        self.totals.failed_steps += bool(discarded)
        events: dict[int, StepEvents] = {}
        for job in self._trials.take_back(discarded):
            if not job.ended:  # no beam of a search that ended with another
                self._fail(job, error, events)
        return events

    def abandon(self, error: Reason) -> dict[int, StepEvents]:
        """The engine is lost: everything that waits or runs ends with `error`."""
        self._flights.clear()
        events: dict[int, StepEvents] = {}
        jobs = [job for choices in self._state.requests.values() for job in choices.values()]
        for job in jobs:
            if not job.ended:
                add_errors(events, [job], error, time.monotonic())
                self._departures.end(job)
        return events

    # --- planning ----------------------------------------------------------------------------------------------

    def _plan(self) -> StepPlan | None:
        state = self._state
        if not state.requests:
            return None
        view = self._view()
        rows, n_query = self._settle(view, self._decide(view))
        if not rows.size and not self._flights:
            self._release_unused(view, rows)
            view = self._view()
            rows, n_query = self._settle(view, oldest_first(view))
        rows, n_query = self._secure(view, rows, n_query)
        self._release_unused(view, rows)
        if not rows.size:
            return None
        self._note_admissions(view.placed)
        flight = enqueue(state, rows, n_query, view.placed)
        self._flights.append(flight)
        state.step += 1
        return flight.plan

    def _view(self) -> StepView:
        state, table = self._state, self._state.table
        running = table.running()
        if table.bound:
            held = [row for row, bound in table.bound.items() if bound.held]
            running = running[~np.isin(running, held)] if held else running
        if table.beams:
            running = outrun(running, state)
        suspect = self._trials.suspect()
        if suspect is not None:
            return self._trials.view(suspect, running)
        admit = state.step - self._last_join >= state.limits.wait_steps or not running.size
        return StepView(state, running, state.queue, admit=admit)

    def _decide(self, view: StepView) -> Decision:
        try:
            decision = self._policy.plan(view)
            wrong = fault(decision, view, self._state.limits.max_running)
        except BaseException as error:  # noqa: BLE001 - a foreign policy may raise anything
            reraise_if_stopping(error)
            wrong = f"it raised {text_of(error)}"
        if wrong is None and self._passed_over >= PATIENCE:
            wrong = f"the oldest request was passed over {PATIENCE} times in a row"
        if wrong is None:
            return decision
        name = type(self._policy).__name__
        TALLIES.count("plugin_failures", name, "scheduler")
        if not self._distrusted:
            what = "the scheduling policy %s is overruled: %s; such steps run the oldest requests first instead"
            log.error(what, name, wrong)
            self._distrusted = True
        self._passed_over = 0
        return oldest_first(view)

    def _settle(self, view: StepView, decision: Decision) -> tuple[Int32, Int32]:
        """The rows of a decision, chunks cut back to granule borders; who is left with nothing is left out."""
        state, table = self._state, self._state.table
        rows, n_query = np.asarray(decision.rows, np.int32), np.asarray(decision.n_query, np.int32)
        if decision.admit:
            new = [(view.offers[index][0].row, first) for index, first in decision.admit]
            joining, first_chunks = np.array(new, np.int32).T
            rows, n_query = np.concatenate((rows, joining)), np.concatenate((n_query, first_chunks))
        starts, length = table.computed[rows], table.length[rows]
        ends = starts + n_query
        partial = ends < length
        if partial.any():
            ends[partial] -= ends[partial] % state.space.granule
            if view.whole:
                ends[partial & (length - starts <= view.budget)] = 0
        some = ends > starts
        rows, n_query = rows[some], (ends - starts)[some]
        oldest_ran = not view.running.size or bool((rows == view.running[0]).any())
        self._passed_over = 0 if oldest_ran else self._passed_over + 1
        return rows, n_query

    def _secure(self, view: StepView, rows: Int32, n_query: Int32) -> tuple[Int32, Int32]:
        """Have slots for all rows: evict, take reserves back, then preempt; the oldest request always stays."""
        state, table = self._state, self._state.table
        trimmed = False
        while rows.size:
            starts = table.computed[rows]
            if state.space.secure(rows, starts, starts + n_query):
                break
            running = table.running()
            if not trimmed:
                state.space.trim(running, table.computed[running])
                trimmed = True
                continue
            leaving = victim(running, table)
            job = table.job(leaving)
            if job in view.placed:
                view.placed.remove(job)
                self._departures.unplace(job)
            else:
                self.totals.preemptions += 1
                self._departures.preempt(leaving)
            stays = table.status[rows] == RUNNING
            rows, n_query = rows[stays], n_query[stays]
        return rows, n_query

    def _release_unused(self, view: StepView, rows: Int32) -> None:
        """Take places back from candidates that were found to fit but do not run."""
        runs = set(rows.tolist()) if view.placed else set()
        for job in view.placed:
            if job.row not in runs:
                self._departures.unplace(job)
        view.placed = [job for job in view.placed if job.row != NO_ROW]

    def _note_admissions(self, placed: Sequence[Job]) -> None:
        state = self._state
        for job in placed:
            state.queue.remove(job)
            job.waits = None
            self._last_join = state.step
            if job.cached < 0:
                job.cached = int(state.table.taken[job.row])
                self.totals.prompt_tokens += job.prompt.size
                self.totals.cached_tokens += job.cached

    def _fail(self, job: Job, error: Reason, events: dict[int, StepEvents]) -> None:
        add_errors(events, [job], error, time.monotonic())
        self._departures.fail(job, error)
