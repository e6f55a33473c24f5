"""What the results of a step do to the requests that were in it, and the events that tell their owners."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import compress

import numpy as np
from numpy.typing import NDArray

from llmcore.bridge import Finish, StepEvents
from llmcore.protocols import Int32
from llmcore.sched.beam_search import Beams, Child, Ended
from llmcore.sched.failure_isolation import NOT_FINITE, FailureIsolation
from llmcore.sched.in_flight import InFlight
from llmcore.sched.plan import StepPlan, StepResult
from llmcore.sched.processors import Reason
from llmcore.sched.release import Release
from llmcore.sched.request import LEAVING, Choice, Request, RequestTable, State

STOP, LENGTH = int(Finish.STOP), int(Finish.LENGTH)


class Results:
    """Counts tokens, ends choices that are done or broken, and sends preempted ones back to the queue."""

    def __init__(self, state: State, release: Release, isolation: FailureIsolation) -> None:
        self._state = state
        self._release = release
        self._isolation = isolation

    def take(self, step: InFlight, result: StepResult) -> tuple[Int32, dict[int, StepEvents]]:
        """The rows that a token was counted for, and the events of the step by owner."""
        plan, table = step.plan, self._state.table
        stamp = time.monotonic()
        self._state.totals.steps += 1
        alive = table.epoch[plan.request] == step.row_epoch
        table.settle(plan.request[alive], (plan.start + plan.n_query)[alive])
        if plan.probes or plan.pools:
            _note(table, plan, alive, result)
        rejected = self._isolation.reject(step, result) if not result.finite.all() else []
        at = np.flatnonzero((table.epoch[plan.sample_request] == step.sample_epoch) & result.finite)
        if table.processors:
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
            self._hear(plan.sample_request[beams], beams, result, events, stamp)
        add_errors(events, rejected, NOT_FINITE, stamp)
        for choice, error in failed:
            add_errors(events, [choice], error, stamp)
        return rows, events

    def _tell(
        self, at: NDArray[np.intp], rows: Int32, tokens: Int32
    ) -> tuple[NDArray[np.intp], NDArray[np.bool_], list[tuple[Choice, Reason]]]:
        """Tell logits processors of their rows' tokens; end the rows of those that fail.

        Returns which of `at` are left, which of these end with their token, and (choice, error) of the others.
        """
        table = self._state.table
        ends, fine = np.zeros(at.size, np.bool_), np.ones(at.size, np.bool_)
        failed = []
        for i, (row, token) in enumerate(zip(rows.tolist(), tokens.tolist(), strict=True)):
            processors = table.processors.get(row)
            if processors is None:
                continue
            if processors.error is None:
                ends[i] = processors.accept(token)
            if processors.error is not None:
                choice = table.choice(row)
                self._release.fail(choice, processors.error)
                failed.append((choice, processors.error))
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
        produced = table.accept(rows, tokens)
        stops = (table.stops[rows] == tokens[:, None]).any(axis=1)
        for i in np.flatnonzero(table.many_stops[rows]):
            stops[i] = int(tokens[i]) in table.choice(int(rows[i])).request.submit.stop_ids
        stops &= produced > table.min_new[rows]
        stops |= result.scores is not None
        if ends is not None:
            stops |= ends
        finish = np.where(produced >= table.max_new[rows], LENGTH, 0).astype(np.int32)
        finish[stops] = STOP
        self._state.totals.output_tokens += rows.size if result.scores is None else 0
        events = _by_owner(Accepted(rows, tokens, finish, at), table, result, stamp)
        if result.pooled is not None:
            self._state.totals.output_tokens -= sum(len(mine.pooled) for mine in events.values())
        for i in np.flatnonzero(finish):
            self._state.estimator.observe(int(produced[i]))
            self._release.end(table.choice(int(rows[i])))
        left = (table.status[rows] == LEAVING) & (table.known[rows] == table.length[rows])
        for row in rows[left].tolist():
            self._state.preempt(row)
        return events

    # --- beam searches -----------------------------------------------------------------------------------------
    # A beam runs like any other choice, but after each of its tokens it waits until all beams of its request have
    # been heard. Then the search says how each of them goes on. A sequence that goes on twice is copied by its table
    # row. What the device drew itself does not count, so it is told of every beam's tokens with the beam's next row.

    def _hear(
        self, rows: Int32, at: NDArray[np.intp], result: StepResult, events: dict[int, StepEvents], stamp: float
    ) -> None:
        """`rows` of beams have their numbers `at` in a step's result; adds the answers of searches that end."""
        assert result.top_ids is not None and result.top_logprobs is not None
        table = self._state.table
        for row, s in zip(rows.tolist(), at.tolist(), strict=True):
            choice, beams = table.choice(row), table.beams[row]
            most = int(table.tops[row])
            if beams.hear(choice.number, result.top_ids[s, :most], result.top_logprobs[s, :most]):
                children = beams.choose()
                if children is None:
                    self._answer(choice, beams, stamp, events)
                else:
                    self._go_on(choice.request, children)

    def _answer(self, choice: Choice, beams: Beams, stamp: float, events: dict[int, StepEvents]) -> None:
        answers = beams.answers()
        self._state.totals.output_tokens += sum(ended.path.length for ended in answers)
        self._state.estimator.observe(answers[0].path.length)
        add_answers(events, choice.request, answers, stamp)
        self._release.end(choice)

    def _go_on(self, request: Request, children: list[Child]) -> None:
        """Let every beam go on as `children` say, by its number."""
        space, table = self._state.space, self._state.table
        if request.choices[0].reserved:
            table.fork(request.choices[0])  # the first tokens of a prompt are there
        rows = [request.choices[number].row for number in range(len(children))]
        moved = [number for number, child in enumerate(children) if child.parent != number]
        for number in moved:
            space.drop(rows[number])
        for number in moved:
            source = rows[children[number].parent]
            space.fork(source, rows[number], int(table.computed[source]))
            table.take_over(source, rows[number])
        for row, child in zip(rows, children, strict=True):
            table.go_on(row, rows[child.parent], child.path.token)


# --- events ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Accepted:
    """Tokens that were read, one for each of `rows`: columns. Token i is number `at[i]` of the step's result.

    `finish` is a Finish. The table counts the tokens already, and the rows still have their places.
    """

    rows: Int32
    tokens: Int32
    finish: Int32
    at: NDArray[np.intp]


def _by_owner(accepted: Accepted, table: RequestTable, result: StepResult, stamp: float) -> dict[int, StepEvents]:
    """The events of one step for each owner."""
    owners = table.owner[accepted.rows]
    if not owners.size:
        return {}
    if (owners == owners[0]).all():
        return {int(owners[0]): _events(accepted, table, result, stamp)}
    events = {}
    for owner in np.unique(owners):
        mine = np.flatnonzero(owners == owner)
        part = Accepted(accepted.rows[mine], accepted.tokens[mine], accepted.finish[mine], accepted.at[mine])
        events[int(owner)] = _events(part, table, result, stamp)
    return events


def add_errors(events: dict[int, StepEvents], choices: Iterable[Choice], error: Reason, stamp: float) -> None:
    """Each of `choices`, and all choices that it still stands for, end with `error`."""
    for choice in choices:
        request = choice.request
        mine = _of(request, events, stamp)
        first, count = (choice.number, choice.places) if request.beams is None else (0, request.submit.n)
        for number in range(first, first + count):
            mine.error[len(mine.request)] = error
            mine.request.append(request.submit.id)
            mine.choice.append(number)
            mine.count.append(0)
            mine.finish.append(Finish.ERROR)


def add_answers(events: dict[int, StepEvents], request: Request, answers: Sequence[Ended], stamp: float) -> None:
    """The choices of `request`, whose search is over, end with `answers`."""
    mine = _of(request, events, stamp)
    asked = request.beams.submit.sampling.logprobs if request.beams is not None else None
    for number, ended in enumerate(answers):
        path, i = ended.path.tokens(), len(mine.request)
        if asked is not None and not mine.logprobs:
            mine.logprobs = [0.0] * len(mine.tokens)
        if asked is not None or mine.logprobs:
            mine.logprobs += [one.logprob if asked is not None else 0.0 for one in path]
        if asked:
            mine.top[i] = [list(one.top) for one in path]
        if number == 0 and request.prompt_logprobs is not None:
            _add_prompt(mine, i, request)
        mine.cached[i] = request.cached
        mine.request.append(request.submit.id)
        mine.choice.append(number)
        mine.count.append(len(path))
        mine.tokens += [one.token for one in path]
        mine.finish.append(ended.finish)


def _of(request: Request, events: dict[int, StepEvents], stamp: float) -> StepEvents:
    """The events of the request's owner, to add to."""
    empty = StepEvents(stamp=stamp, request=[], choice=[], count=[], tokens=[], finish=[])
    return events.setdefault(request.owner, empty)


def _events(accepted: Accepted, table: RequestTable, result: StepResult, stamp: float) -> StepEvents:
    rows = accepted.rows
    events = StepEvents(
        stamp=stamp,
        request=table.request[rows].tolist(),
        choice=table.number[rows].tolist(),
        count=[1] * rows.size,
        tokens=accepted.tokens.tolist(),
        finish=accepted.finish.tolist(),
    )
    for i in np.flatnonzero(table.known[rows] == table.prompt_len[rows] + 1):
        request = table.choice(int(rows[i])).request
        events.cached[int(i)] = request.cached
        if int(rows[i]) in table.probing:
            _add_prompt(events, int(i), request)
            table.probing.discard(int(rows[i]))
    if result.scores is not None:
        events.count, events.tokens = [0] * rows.size, []
        events.scores = dict(enumerate(result.scores[accepted.at].tolist()))
    if result.logprobs is not None:
        _add_logprobs(events, accepted.at, table.tops[rows], result.logprobs, result)
    return _without_tokens(events) if events.pooled else events


def _add_prompt(events: StepEvents, i: int, request: Request) -> None:
    """Row `i` brings what its request wants of its prompt."""
    if request.prompt_logprobs is not None:
        events.prompt_logprobs[i] = request.prompt_logprobs.tolist()
    if request.prompt_ranks is not None:
        events.prompt_ranks[i] = request.prompt_ranks.tolist()
    if request.prompt_top is not None:
        places = zip(*(column.tolist() for column in request.prompt_top), strict=True)
        events.prompt_top[i] = [list(zip(ids, logprobs, strict=True)) for ids, logprobs in places]
    if request.pooled is not None:
        count = request.prompt.size if request.submit.pool == "mean" else 1
        events.pooled[i] = (request.pooled / count).astype("<f4").tobytes()
    request.prompt_logprobs = request.prompt_ranks = request.prompt_top = None


def _without_tokens(events: StepEvents) -> StepEvents:
    """The rows that bring a hidden state have been drawn for, too, but nobody asked for that."""
    kept = [i not in events.pooled for i in range(len(events.count))]
    events.tokens = list(compress(events.tokens, kept))
    events.logprobs = list(compress(events.logprobs, kept))
    events.count = [int(keep) for keep in kept]
    events.finish = [finish if keep else Finish.STOP for finish, keep in zip(events.finish, kept, strict=True)]
    return events


def _add_logprobs(
    events: StepEvents, at: NDArray[np.intp], tops: Int32, logprobs: NDArray[np.float32], result: StepResult
) -> None:
    if not (tops >= 0).any():
        return
    events.logprobs = np.where(tops >= 0, logprobs[at], 0.0).tolist()
    if result.top_ids is None or result.top_logprobs is None:
        return
    for i in np.flatnonzero(tops > 0):
        k, s = int(tops[i]), int(at[i])
        best = zip(result.top_ids[s, :k].tolist(), result.top_logprobs[s, :k].tolist(), strict=True)
        events.top[int(i)] = [list(best)]


def _note(table: RequestTable, plan: StepPlan, alive: NDArray[np.bool_], result: StepResult) -> None:
    """Put a step's answers where those of its requests' other chunks are; `alive`: rows that are still theirs."""
    if result.probed is not None:
        _note_logprobs(table, plan, alive, result)
    if result.pooled is None:
        return
    for pool, state in zip(plan.pools, result.pooled, strict=True):
        if alive[pool.row]:
            request = table.choice(int(plan.request[pool.row])).request
            # A request that was sent back computes its whole prompt again.
            first = request.pooled is None or request.submit.pool == "last" or not plan.start[pool.row]
            request.pooled = state.copy() if first else request.pooled + state


def _note_logprobs(table: RequestTable, plan: StepPlan, alive: NDArray[np.bool_], result: StepResult) -> None:
    assert result.probed is not None
    at = 0
    for probe in plan.probes:
        end = at + probe.targets.size
        request = table.choice(int(plan.request[probe.row])).request if alive[probe.row] else None
        if request is not None and request.prompt_logprobs is not None:
            start = int(plan.start[probe.row])
            known = slice(start, start + probe.targets.size)
            request.prompt_logprobs[known] = result.probed[at:end]
            if request.prompt_ranks is not None and result.probed_ranks is not None:
                request.prompt_ranks[known] = result.probed_ranks[at:end]
            if request.prompt_top is not None and result.probed_top_ids is not None:
                assert result.probed_top_logprobs is not None
                request.prompt_top[0][known] = result.probed_top_ids[at:end, : probe.top]
                request.prompt_top[1][known] = result.probed_top_logprobs[at:end, : probe.top]
        at = end
