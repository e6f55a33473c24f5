"""The scheduler's mechanism: requests in, plans out, results in, events out. Policy is a plugin's.

It never waits and never looks at a device. With steps in flight, lengths are what they will be once those were read.
The row and the slots of a choice that ends are free at once, because steps run in the order of their plans.
A result for a choice that is gone finds a new epoch at its row and is dropped.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from llmcore.api.bridge import Load, StepEvents, Submit
from llmcore.api.counters import TALLIES
from llmcore.api.errors import RequestError, reraise_if_stopping, text_of
from llmcore.api.protocols import Decision, Int32, LengthEstimator, SchedulerLimits, SchedulerPolicy
from llmcore.kv.slots import RUN_TOKENS
from llmcore.kv.space import KVGroup, KVSpace
from llmcore.sched.capacity import Capacity, check_submit, fitting
from llmcore.sched.in_flight import Results, add_error, enqueue
from llmcore.sched.isolation import FailureIsolation
from llmcore.sched.plan import InFlight, StepPlan, StepResult
from llmcore.sched.policy import PATIENCE, StepView, fault, oldest_first
from llmcore.sched.processors import ChoiceProcessors, Reason, Steered
from llmcore.sched.request import (
    NO_ROW,
    RESERVED,
    RUNNING,
    Choice,
    KVSource,
    Lease,
    Request,
    RequestTable,
    State,
)

log = logging.getLogger(__name__)

NO_EPOCH = -1
"""An epoch that no row ever has: such a result is dropped."""


@dataclass(frozen=True)
class QueueStats:
    """Choices that wait and the tokens they will compute first; `places` for choices and KV `slots`, in tokens, that
    no request holds."""

    choices: int
    tokens: int
    places: int
    slots: int


class Scheduler:
    """Requests of several owners (HTTP workers) on one engine; used by one thread.

    `plan` makes the next step; `commit` takes the results of the oldest one not read yet. Up to `ahead` plans may be
    made before a commit. `priorities`: the policy heeds those of requests. `drafts`: the most drafted tokens that a
    row verifies; results then say how many tokens each sample has. `graph_rows`: the most rows of a decode step that
    is captured. Raises ConfigError where `limits` contradict each other or the groups.
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
        drafts: int = 0,
        graph_rows: int = 0,
    ) -> None:
        self.space = KVSpace(groups)
        """The KV groups, for figures and checks."""
        self.limits = fitting(limits, self.space)
        """The limits, cut to what fits together."""
        table = RequestTable(self.limits.max_running, self.limits.max_total_len)
        self._state = State(self.limits, table, self.space, estimator, ahead, drafts, graph_rows)
        self.totals = self._state.totals
        """Counters since the start."""
        self._policy = policy
        self._priorities = priorities
        self._isolation = FailureIsolation(self._state)
        self._results = Results(self._state, self._isolation)
        self._in_flight: deque[InFlight] = deque()
        self._arrivals = 0
        self._last_join = -limits.wait_steps
        self._passed_over = 0
        self._distrusted = False

    @property
    def idle(self) -> bool:
        """Nothing waits, runs or is on its way."""
        return not self._state.requests and not self._in_flight

    def check(self) -> None:
        """Assert what must hold between any two calls; for tests."""
        state, table = self._state, self._state.table
        state.space.check()
        table.check()
        rows = table.running()
        for group in state.space.groups:
            most = group.granules_of(table.computed[rows] + RUN_TOKENS)
            assert (group.held[rows] <= most).all(), "a row keeps slots that it does not need"

    # --- what the front end asks for ---------------------------------------------------------------------------

    def submit(
        self,
        submit: Submit,
        owner: int,
        processors: Sequence[ChoiceProcessors] = (),
        source: KVSource | None = None,
    ) -> None:
        """Queue a request; `processors`: its own, by choice. `source`: writes the KV of its beginning once
        there is room for it. Raises RequestError if it can never be served."""
        self.validate(submit, owner)
        self._state.add(Request.of(submit, owner, self._arrivals, processors, source))
        self._arrivals += submit.choices

    def validate(self, submit: Submit, owner: int) -> None:
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
        request = self._state.requests.get((owner, request_id))
        if request is not None:
            self.totals.aborts += 1
            for choice in list(request.choices.values()):
                self._state.end(choice)

    def finish(self, owner: int, request_id: int, number: int, n_tokens: int) -> None:
        """End one choice, without events, as if it had produced only its first `n_tokens` tokens."""
        request = self._state.requests.get((owner, request_id))
        if request is None or number not in request.choices:
            return
        choice = request.choices[number]
        # KV that it took from the cache or entered stays there, even behind its last token.
        entered = 0 if choice.row == NO_ROW else int(self._state.table.entered[choice.row])
        self._state.estimator.observe(n_tokens)
        self._state.end(choice, max(len(request.prompt) + n_tokens, entered))

    def filled(self, lease: Lease) -> None:
        """The source has written all that it was to write: the request may run. One that is not loading any more is
        ignored."""
        if self._state.table.leases.get(lease.row) is lease:
            self._state.table.loaded(lease.row)

    def lapse(self, now: float) -> None:
        """Take back the slots of leases that have expired by `now` (time.monotonic()); their requests wait again, and
        compute their prompts themselves."""
        for row in [row for row, lease in self._state.table.leases.items() if lease.expires <= now]:
            self._state.preempt(row)

    def queue_stats(self) -> QueueStats:
        """The queue, and the room that there is now. Slots are those of the first group."""
        queue, group = self._state.queue, self._state.space.groups[0]
        return QueueStats(
            choices=queue.places,
            tokens=queue.tokens,
            places=self._state.table.places,
            slots=(group.pool.total - group.pool.live) * group.granule,
        )

    def expire(self, before: float, error: Reason) -> dict[int, StepEvents]:
        """End with `error` the requests that were received before that time and have never run. Returns errors by
        owner, as events."""
        fresh = self._state.queue.fresh.values()
        late = [(choice, error) for choice in fresh if 0.0 < choice.request.submit.received < before]
        return self._end(late, failed=False)

    def who(self, index: int) -> tuple[int, int]:
        """(owner, request id) of the request that has `index` in plans; ids as submitted."""
        return self._state.table.choice(index).request.key

    def load(self) -> Load:
        """A snapshot: requests, the first group's slots in tokens, the future peak as last foreseen, and totals."""
        state = self._state
        group = state.space.groups[0]
        return Load(
            running=int(np.count_nonzero(state.table.status > RESERVED)),
            waiting=len(state.queue),
            waiting_tokens=state.queue.tokens,
            kv_live=group.pool.live * group.granule,
            kv_cached=group.pool.cached * group.granule,
            kv_free=group.pool.free * group.granule,
            kv_total=group.pool.total * group.granule,
            kv_granule=group.granule,
            peak=Capacity(state, ask=False).peak,
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
        if plan is None and not self._in_flight and self._isolation.suspect() is not None:
            self._isolation.dismiss()
            plan = self._plan()
        return plan

    def commit(self, plan: StepPlan, result: StepResult) -> dict[int, StepEvents]:
        """Take a step's results; plans are committed in the order they were made. Returns events by owner."""
        if not self._in_flight or self._in_flight[0].plan.number != plan.number:
            raise ValueError("plans are committed once, in the order in which they were made")
        return self._results.take(self._in_flight.popleft(), result)

    def steering(self, plan: StepPlan) -> list[Steered]:
        """The logits processors of the newest plan's late samples, by the number of the sample."""
        processors = self._state.table.processors
        return [(s, processors[int(plan.sample_request[s])]) for s in plan.late.tolist()]

    def postpone(self, plan: StepPlan, late: Sequence[int]) -> None:
        """The requests `late`, in rows of one token of the newest plan, get none from it: their next rows repeat it.

        Call it before the next plan is made.
        """
        step, table = self._newest(plan), self._state.table
        for request in late:
            if table.epoch[request] == step.epochs[request]:
                self.totals.late_masks += 1
                table.postpone(request)
            step.epochs[request] = NO_EPOCH

    def expel(self, plan: StepPlan, errors: Mapping[int, Reason]) -> dict[int, StepEvents]:
        """The requests `errors` of the newest plan end, each with its error. Returns errors by owner, as events."""
        step, table = self._newest(plan), self._state.table
        alive = [request for request in errors if table.epoch[request] == step.epochs[request]]
        return self._end([(table.choice(request), errors[request]) for request in alive])

    def _newest(self, plan: StepPlan) -> InFlight:
        if self._in_flight[-1].plan.number != plan.number:
            raise ValueError("only the newest plan's requests can be postponed or expelled")
        return self._in_flight[-1]

    def give_up(self) -> dict[int, StepEvents]:
        """End requests whose logits processors never answer. Returns errors by owner, as events."""
        now = time.monotonic()
        bound = [(choice, one) for choice in self._state.choices() for one in choice.all_processors]
        return self._end([(choice, one.error) for choice, one in bound if one.overdue(now) and one.error])

    def fail(self, plan: StepPlan, error: Reason) -> dict[int, StepEvents]:
        """The step of `plan` failed and it and all after it were discarded. Returns errors by owner, as events.

        All its choices compute again, each alone until it has produced a token. One that fails then ends with `error`.
        """
        discarded = []
        while self._in_flight and self._in_flight[-1].plan.number >= plan.number:
            discarded.append(self._in_flight.pop())
        self.totals.failed_steps += bool(discarded)
        return self._end([(choice, error) for choice in self._isolation.take_back(discarded)])

    def abandon(self, error: Reason) -> dict[int, StepEvents]:
        """The engine is lost: everything that waits or runs ends with `error`."""
        self._in_flight.clear()
        return self._end([(choice, error) for choice in self._state.choices()], failed=False)

    # --- planning ----------------------------------------------------------------------------------------------

    def _plan(self) -> StepPlan | None:
        state = self._state
        if not state.requests:
            return None
        for decide in (self._decide, oldest_first):
            view = self._view()
            rows, n_query = self._secure(view, *self._rows_of(view, decide(view)))
            view.keep(rows)
            if rows.size or self._in_flight:
                break
        if not rows.size:
            return None
        if state.drafts:
            n_query = self._with_drafts(rows, n_query)
        for choice in view.placed:
            state.admitted(choice)
            self._last_join = state.step
        step = enqueue(state, rows, n_query)
        self._in_flight.append(step)
        state.step += 1
        return step.plan

    def _view(self) -> StepView:
        state, table = self._state, self._state.table
        running = table.running()
        if table.processors or table.beams:
            # Left out: choices whose logits processors are late, and beams that wait for others of their search.
            waiting = [row for row, processors in table.processors.items() if processors.held]
            waiting += [row for row in table.beams if table.length[row] > table.known[row]]
            running = running[~np.isin(running, waiting)]
        suspect = self._isolation.suspect()
        if suspect is not None:
            alone = np.isin(running, [choice.row for choice in suspect.together])
            return StepView(state, running[alone], [suspect], admit=True)
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
            self._distrusted = True
            log.error(
                "the scheduling policy %s is overruled: %s; such steps run the oldest requests first instead",
                name,
                wrong,
            )
        self._passed_over = 0
        return oldest_first(view)

    def _rows_of(self, view: StepView, decision: Decision) -> tuple[Int32, Int32]:
        """The rows of a decision, chunks cut back to granule borders; rows that are left with nothing are left out."""
        state, table = self._state, self._state.table
        rows, n_query = np.asarray(decision.rows, np.int32), np.asarray(decision.n_query, np.int32)
        if decision.admit:
            placed = [(view.offers[index][0], first) for index, first in decision.admit]
            new = [(choice.row, first) for choice, first in placed if not self._load(view, choice)]
            joining, first_chunks = np.array(new, np.int32).reshape(-1, 2).T
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

    def _load(self, view: StepView, choice: Choice) -> bool:
        """True if `choice`, which was placed, has a source for its KV: then it is in no step. It holds the slots under
        a lease from now on, or waits for slots."""
        state, table, row = self._state, self._state.table, choice.row
        request, source, start = choice.request, choice.request.source, int(table.computed[row])
        end = request.given(start)
        if source is None or end == start:
            return False
        rows, starts, ends = np.array([[row], [start], [end]], np.int32)
        if not state.space.secure(rows, starts, ends):
            view.unplace(choice)
            return True
        view.placed.remove(choice)
        for group in state.space.groups:
            group.grow(rows, ends, table.limit[rows])
        state.admitted(choice)
        granules = tuple(
            group.row(row)[start // group.granule : group.granules(end)].copy() for group in state.space.groups
        )
        lease = Lease(row, request.key, start, end, granules, time.monotonic() + source.seconds, source)
        table.load(row, lease)
        source.begin(lease)
        return True

    def _secure(self, view: StepView, rows: Int32, n_query: Int32) -> tuple[Int32, Int32]:
        """Have slots for all rows: evict, take reserves back, then preempt; the oldest request always stays."""
        state, table = self._state, self._state.table
        trimmed = False
        while rows.size and not state.space.secure(rows, table.computed[rows], table.computed[rows] + n_query):
            running = table.running()
            if not trimmed:
                state.space.trim(running, table.computed[running])
                trimmed = True
            elif table.leases:
                state.preempt(list(table.leases)[-1])
            elif (newest := victim(table)) in view.placed:
                view.unplace(newest)
            else:
                self.totals.preemptions += 1
                state.preempt(newest.row)
            stays = table.status[rows] == RUNNING
            rows, n_query = rows[stays], n_query[stays]
        return rows, n_query

    def _with_drafts(self, rows: Int32, n_query: Int32) -> Int32:
        """Let the rows that decode verify drafts too, as far as their limits, the budget and the slots allow.

        Drafts are a guess: they take no slots that other requests count on, and never cause a preemption. Rows whose
        tokens the host decides, by logits processors or a beam search, verify none.
        """
        state, table = self._state, self._state.table
        starts = table.computed[rows]
        able = (starts >= table.prefill[rows]) & ~np.isin(rows, [*table.processors, *table.beams])
        drafts = np.clip(table.limit[rows] - starts - n_query, 0, state.drafts) * able
        left = state.limits.batch_tokens - int(n_query.sum())
        drafts = np.clip(left - (np.cumsum(drafts) - drafts), 0, drafts).astype(np.int32)
        if not drafts.any() or not Capacity(state, ask=False).holds(rows, drafts):
            return n_query
        more = n_query + drafts
        return more if state.space.secure(rows, starts, starts + more) else n_query

    def _end(self, ending: Sequence[tuple[Choice, Reason]], *, failed: bool = True) -> dict[int, StepEvents]:
        """End choices, each with its error; `failed`: the model or a plugin failed on them. Returns errors by owner,
        as events."""
        events: dict[int, StepEvents] = {}
        for choice, error in ending:
            if choice.ended:  # a beam ends with the other beams of its search
                continue
            add_error(events, choice, error)
            if failed:
                self._state.fail(choice, error)
            else:
                self._state.end(choice)
        return events


def victim(table: RequestTable) -> Choice:
    """The running choice to preempt: the newest of the lowest priority that is neither the oldest nor a beam of the
    oldest's search."""
    running = table.running()
    spared = [choice.row for choice in table.choice(int(running[0])).together]
    others = running[~np.isin(running, spared)]
    priority = table.priority[others]
    return table.choice(int(others[priority == priority.max()][-1]))
