"""Policies: the view that a scheduling policy gets, the check of its decision, and a fallback.

The scheduler checks every decision of a scheduling policy. A length estimator or a prefix cache that raises, or says
what cannot be, is dismissed, and all requests go on without it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from llmcore.api.counters import TALLIES
from llmcore.api.errors import reraise_if_stopping
from llmcore.api.protocols import (
    Decision,
    Int32,
    Int64,
    KVManager,
    LengthEstimator,
    RequestInfo,
    SchedulerView,
    WaitingRequest,
)
from llmcore.kv.space import NO_GRANULES, Hit, KVGroup, KVSpace
from llmcore.sched.capacity import Capacity, beside_answers
from llmcore.sched.request import NO_ROW, RESERVED, RUNNING, Choice, RequestTable, State, WaitingQueue

WORTH_WAITING = 64
"""Tokens that another request is about to compute for which a candidate waits; or half of its own."""

CROWD = 6
"""Prompts that may wait before they get more of a step than `limits.stall_tokens`. Beyond that their share grows with
the square of their number: a crowd waits longer than any answer, and is computed fastest in large steps."""


class Frontier:
    """The positions at which running prompts will be computed next, so that no other request computes the same."""

    def __init__(self, table: RequestTable, space: KVSpace) -> None:
        self._table = table
        self._space = space
        self._rows: dict[tuple[bytes, int, int, bytes], int] = {}
        rows = table.running()
        for row in rows[table.computed[rows] < table.prefill[rows]].tolist():
            self.add(row)

    def add(self, row: int) -> None:
        """`row` goes on computing its prompt; what it computed so far is in the cache."""
        at = self._space.floor(int(self._table.computed[row]))
        if self._space.caching and at <= self._table.entered[row]:
            last = int(self._space.groups[0].table[row, at // self._space.groups[0].granule - 1]) if at else -1
            content = self._table.content(row, int(self._table.prefill[row]), at)
            salt = self._table.choice(row).request.submit.salt
            self._rows.setdefault((salt, at, last, content[: self._space.granule].tobytes()), row)

    def ahead_of(self, choice: Choice, content: Int64, hit: Hit) -> tuple[int, int, int] | None:
        """(row, its epoch, tokens) to wait for, if another's next tokens are enough of what `choice` would compute."""
        at = hit.tokens
        last = int(hit.granules[0][-1]) if at else -1
        row = self._rows.get((choice.request.submit.salt, at, last, content[at : at + self._space.granule].tobytes()))
        if row is None:
            return None
        theirs = self._table.content(row, int(self._table.prefill[row]), at)
        ours = content[at : at + theirs.size]
        differs = np.flatnonzero(ours != theirs[: ours.size])
        same = self._space.floor(int(differs[0]) if differs.size else ours.size)
        if same < min(WORTH_WAITING, -(-(content.size - at) // 2)):
            return None
        return row, int(self._table.epoch[row]), at + same


class StepView:
    """One step as a policy sees it (protocols.SchedulerView); `placed` are the candidates found to fit, in order."""

    def __init__(self, state: State, running: Int32, queue: WaitingQueue | Sequence[Choice], *, admit: bool) -> None:
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
        self.offers: list[tuple[Choice, Hit]] = []
        """The candidates that were offered; a WaitingRequest's index points here."""
        self.placed: list[Choice] = []
        """Those found to fit, in order; they have places and hold their hits."""
        self._state = state
        self._queue = queue

    @cached_property
    def _frontier(self) -> Frontier:
        return Frontier(self._state.table, self._state.space)

    @cached_property
    def _capacity(self) -> Capacity:
        return Capacity(self._state)

    def info(self, index: int) -> RequestInfo:
        """The wishes of a running request."""
        return self._state.table.choice(index).request.info

    def waiting(self, order: Callable[[RequestInfo], Any] | None = None) -> Iterator[WaitingRequest]:
        """The queue from its head, or by `order`, lowest first; prefix hits are looked up as it is read."""
        state = self._state
        if not state.table.places:
            return
        queue = self._queue if order is None else sorted(self._queue, key=lambda choice: order(choice.request.info))
        for choice in queue:
            if state.table.places < choice.places:
                return
            if choice.row != NO_ROW or not choice.ready or self._waiting_for_another(choice):
                continue
            content = choice.content()[: choice.size - 1]
            hit = state.space.match(choice.request.submit.salt, content[:0] if choice.request.private else content)
            alone = choice.request.private or choice.request.given(hit.tokens) > hit.tokens
            choice.waits = None if alone else self._frontier.ahead_of(choice, content, hit)
            if choice.waits is not None:
                continue
            self.offers.append((choice, hit))
            yield WaitingRequest(
                index=len(self.offers) - 1,
                tokens=choice.size,
                cached=choice.request.given(hit.tokens),
                max_new=choice.request.submit.max_new_tokens - choice.produced.size,
                choices=choice.places,
                waited=state.step - choice.queued_at,
                info=choice.request.info,
            )

    def fits(self, candidate: WaitingRequest) -> bool:
        """True if the future peak allows `candidate`; a request that runs alone always fits."""
        state, table = self._state, self._state.table
        choice, hit = self.offers[candidate.index]
        if choice.row != NO_ROW:
            return True
        if table.places < choice.places:
            return False
        if not self._capacity.fits(choice, hit, alone=not (table.status > RESERVED).any()):
            return False
        table.admit(choice, hit.tokens)
        state.space.take(choice.row, hit)
        self.placed.append(choice)
        self._frontier.add(choice.row)
        return True

    def unplace(self, choice: Choice) -> None:
        """`choice` was found to fit and does not run: take its place back."""
        self.placed.remove(choice)
        self._state.unplace(choice)

    def keep(self, rows: Int32) -> None:
        """Take places back from candidates that were found to fit but are not in `rows`."""
        for choice in [choice for choice in self.placed if choice.row not in rows]:
            self.unplace(choice)

    def _waiting_for_another(self, choice: Choice) -> bool:
        if choice.waits is None:
            return False
        row, epoch, tokens = choice.waits
        table = self._state.table
        return bool(table.epoch[row] == epoch and table.status[row] == RUNNING and table.computed[row] < tokens)


def _prompt_budget(state: State, waiting: int) -> int:
    """Tokens of prompts for the next step; `waiting` requests are in the queue. Answers in progress limit them."""
    limits, table = state.limits, state.table
    if not (limits.stall_tokens and limits.chunked):
        return limits.batch_tokens
    rows = table.running()
    prompts = int(np.count_nonzero(table.length[rows] - table.computed[rows] > 1))
    if prompts == rows.size:
        return limits.batch_tokens
    tokens = limits.stall_tokens * max(CROWD, prompts + waiting) ** 2 // CROWD**2
    return min(limits.batch_tokens, beside_answers(tokens, rows.size - prompts))


class Share:
    """One token to each row that decodes; the policy gives the rest to prompts, in its own order.

    It keeps to the budgets of `view`. With `may_pause`, a whole prompt that does not fit beside the rows that decode
    takes their tokens, and `paused` is True afterwards. A policy allows that at most every other step.
    """

    def __init__(self, view: SchedulerView, *, may_pause: bool = False) -> None:
        self._view = view
        self._may_pause = view.whole and may_pause
        self._decodes = view.remaining == 1
        self._n_query: Int32 = self._decodes.astype(np.int32)
        self._admit: list[tuple[int, int]] = []
        left = view.budget - int(np.count_nonzero(self._decodes))
        if left < 0:
            self._n_query[np.flatnonzero(self._decodes)[left:]] = 0
        self.paused = False
        self.left = max(0, min(left, view.prompt_budget))
        """Tokens that prompts may still have."""

    @property
    def open(self) -> bool:
        """True while another prompt may get something."""
        return self.left > 0 or self._may_pause

    def prompts(self) -> Int32:
        """Places of prompts in `view.running`, oldest first."""
        return np.flatnonzero(~self._decodes).astype(np.int32)

    def compute(self, row: int) -> None:
        """Give the prompt at `row` of `view.running` all it can have."""
        self._n_query[row] = self._take(int(self._view.remaining[row]))

    def admit(self, candidate: WaitingRequest) -> bool:
        """Admit `candidate` if there is room for it; False if no other may follow."""
        need = candidate.tokens - candidate.cached
        if not self._can_have(need) or not self._view.fits(candidate):
            self._close()
            return False
        self._admit.append((candidate.index, self._take(need)))
        return self.open

    def decision(self) -> Decision:
        """The plan of the step."""
        rows = np.flatnonzero(self._n_query)
        return Decision(self._view.running[rows], self._n_query[rows], self._admit)

    def _can_have(self, need: int) -> bool:
        if self._may_pause:
            return True
        return self.left > 0 and (not self._view.whole or min(need, self._view.budget) <= self.left)

    def _take(self, need: int) -> int:
        """Take tokens for a prompt that needs `need`; a whole prompt gets all or none, and none closes the step."""
        view = self._view
        if not self._can_have(need):
            self._close()
            return 0
        tokens = min(need, view.budget) if view.whole else min(need, view.chunk, self.left)
        if tokens > self.left:
            self._n_query[self._decodes] = 0
            self.left, self.paused = view.budget, True
        self.left -= tokens
        self._may_pause = False
        return tokens

    def _close(self) -> None:
        """A whole prompt that waits for room is not overtaken."""
        if self._view.whole:
            self.left, self._may_pause = 0, False


PATIENCE = 64
"""Steps in a row that may pass over the oldest request that could run."""


def fault(decision: Decision, view: StepView, places: int) -> str | None:
    """The fault of `decision`, or None; `places` is the number of rows of the request table."""
    return next(_faults(decision, view, places), None)


def _faults(decision: Decision, view: StepView, places: int) -> Iterator[str]:
    """All faults; each is looked for only if the decision does not have those before it."""
    rows, n_query = np.asarray(decision.rows), np.asarray(decision.n_query)
    if not rows.size and not n_query.size:
        rows = n_query = view.running[:0]
    if rows.ndim != 1 or rows.shape != n_query.shape or rows.dtype.kind not in "iu" or n_query.dtype.kind not in "iu":
        yield "rows and n_query are not two columns of integers of one length"
    if rows.size and (rows.min() < 0 or rows.max() >= places):
        yield "it names a row that does not exist"
    allowed = np.zeros(places, np.int32)
    allowed[view.running] = view.remaining
    if (n_query < 1).any() or (n_query > allowed[rows]).any():
        yield "it computes more of a request than remains, or nothing of it, or one that cannot run"
    if rows.size and np.bincount(rows).max() > 1:
        yield "it names a request twice"
    if (n_query > view.chunk).any():
        yield f"a row has more than {view.chunk} tokens"
    if view.whole and (n_query < np.minimum(allowed[rows], view.chunk)).any():
        yield "it cuts a prompt in pieces where prompts are computed whole"
    if decision.admit and not view.admit:
        yield "it admits a request in a step in which none may join"
    if len({index for index, _ in decision.admit}) < len(decision.admit):
        yield "it admits a request twice"
    for index, first in decision.admit:
        if not 0 <= index < len(view.offers):
            yield "it admits a request that was not offered"
        choice, hit = view.offers[index]
        if choice.row == NO_ROW:
            yield "it admits a request without asking whether it fits, or one that does not"
        rest = min(choice.size - choice.request.given(hit.tokens), view.chunk)
        if not 1 <= first <= rest:
            yield "the first chunk of an admitted request is empty, or longer than what remains or than a chunk"
        if view.whole and first < rest:
            yield "it cuts a prompt in pieces where prompts are computed whole"
    total = int(n_query.sum()) + sum(first for _, first in decision.admit)
    if total > view.budget:
        yield f"its rows have {total} tokens; the budget is {view.budget}"


def oldest_first(view: StepView) -> Decision:
    """The least that makes progress: what runs in order of arrival, and the head of the queue if nothing does."""
    wish = np.minimum(view.remaining, view.chunk)
    before = np.cumsum(wish) - wish
    n_query = np.minimum(wish, np.maximum(view.budget - before, 0)).astype(np.int32)
    if view.whole:
        n_query[n_query < wish] = 0
    rows = np.flatnonzero(n_query)
    admit = []
    candidate = None if rows.size else next(view.waiting(), None)
    if candidate is not None and view.fits(candidate):
        admit.append((candidate.index, min(candidate.tokens - candidate.cached, view.chunk, view.budget)))
    return Decision(view.running[rows], n_query[rows], admit)


log = logging.getLogger(__name__)

P = TypeVar("P")
R = TypeVar("R")


class _Guarded(Generic[P]):
    """`policy` until it is dismissed. `name` and `kind` are what is counted then, and `news` % name is logged."""

    def __init__(self, policy: P, name: str, kind: str, news: str) -> None:
        self._policy: P | None = policy
        self._name = name
        self._kind = kind
        self._news = news

    def _ask(self, question: Callable[[P], R], otherwise: Callable[[], R]) -> R:
        """The policy's answer to `question`, which raises on answers that cannot be; else what `otherwise` says."""
        if self._policy is not None:
            try:
                return question(self._policy)
            except BaseException as error:  # noqa: BLE001 - a foreign policy may raise anything
                reraise_if_stopping(error)
                self._dismiss(error)
        return otherwise()

    def _dismiss(self, error: BaseException) -> None:
        self._policy = None
        TALLIES.count("plugin_failures", self._name, self._kind)
        log.error(self._news, self._name, exc_info=error)


class GuardedEstimator(_Guarded[LengthEstimator]):
    """A LengthEstimator; once it is dismissed, every answer is foreseen at its full length."""

    def __init__(self, estimator: LengthEstimator, name: str) -> None:
        news = "length estimator %r has failed; from now on full lengths are foreseen"
        super().__init__(estimator, name, "length_estimator", news)
        self.guaranteed = estimator.guaranteed

    def totals(self, produced: Int32, max_new: Int32, ignore_eos: NDArray[np.bool_], used: float) -> Int32:
        """LengthEstimator."""

        def checked(estimator: LengthEstimator) -> Int32:
            totals = np.asarray(estimator.totals(produced, max_new, ignore_eos, used))
            if totals.shape != produced.shape or not np.isfinite(totals).all():
                raise ValueError(f"totals() gave {totals} for {produced.size} requests")
            return totals

        return self._ask(checked, lambda: max_new)

    def observe(self, produced: int) -> None:
        """LengthEstimator."""
        self._ask(lambda estimator: estimator.observe(produced), lambda: None)


class GuardedManager(_Guarded[KVManager]):
    """The KVManager of `group`; once it is dismissed nothing enters the cache, and what is in it leaves as needed."""

    def __init__(self, group: KVGroup, name: str) -> None:
        news = "prefix cache %r has failed; from now on nothing is cached"
        super().__init__(group.manager, name, "kv_manager", news)
        self._group = group
        self.caching = group.manager.caching

    def match(self, salt: bytes, content: Int64) -> Int32:
        """KVManager."""
        return self._name_granules(lambda manager: manager.match(salt, content), lambda: NO_GRANULES, kept=True)

    def insert(self, salt: bytes, content: Int64, granules: Int32) -> Int32:
        """KVManager."""
        return self._name_granules(
            lambda manager: manager.insert(salt, content, granules), lambda: NO_GRANULES, kept=False
        )

    def remove(self, salt: bytes, content: Int64, start: int) -> Int32:
        """KVManager; once it is dismissed, all granules go, because their contents are unknown."""
        return self._name_granules(lambda manager: manager.remove(salt, content, start), self._left, kept=True)

    def evict(self, n: int, in_use: Callable[[Int32], NDArray[np.bool_]]) -> Int32:
        """KVManager."""

        def any_unused() -> Int32:
            left = self._left()
            return left[~in_use(left)][:n]

        return self._name_granules(lambda manager: manager.evict(n, in_use), any_unused, kept=True)

    def stats(self) -> Mapping[str, int]:
        """KVManager."""
        return self._ask(
            lambda manager: {name: int(value) for name, value in manager.stats().items()},
            lambda: {"granules": self._left().size, "nodes": 0},
        )

    def _name_granules(
        self, question: Callable[[KVManager], Int32], otherwise: Callable[[], Int32], *, kept: bool
    ) -> Int32:
        def checked(manager: KVManager) -> Int32:
            granules = question(manager)
            self._group.check_named(granules, kept=kept)
            return granules

        return self._ask(checked, otherwise)

    def _dismiss(self, error: BaseException) -> None:
        self.caching = False
        super()._dismiss(error)

    def _left(self) -> Int32:
        return np.flatnonzero(self._group.pool.kept).astype(np.int32)
