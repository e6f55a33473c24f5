"""Steps in flight: the plan that a set of rows becomes, and what changes when its results were read.

The tokens of a step that was read are counted, choices end, and events tell the owners.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from llmcore.api.bridge import Finish, StepEvents
from llmcore.api.protocols import Int32, Int64
from llmcore.kv.slots import RUN_TOKENS
from llmcore.kv.space import Columns
from llmcore.sched.beam_search import Beams, Continuation
from llmcore.sched.isolation import FailureIsolation
from llmcore.sched.plan import (
    NONE,
    Admitted,
    Entered,
    InFlight,
    Pool,
    Probe,
    StepPlan,
    StepResult,
    TableWrites,
    Want,
    frame_of,
)
from llmcore.sched.processors import Reason
from llmcore.sched.request import LEAVING, NO_TOKEN, RUNNING, Choice, Request, RequestTable, State

STOP, LENGTH = int(Finish.STOP), int(Finish.LENGTH)


def enqueue(state: State, rows: Int32, n_query: Int32) -> InFlight:
    """Make the plan of a step in which `rows` compute `n_query` tokens each; slots have been secured.

    From here on these tokens count as computed, and the most that a row can give as part of its sequence, before
    the host has read what it gave.
    """
    table, space = state.table, state.space
    decodes = table.computed[rows] >= table.prefill[rows]
    steady = bool(decodes.all())
    if not steady or (state.drafts and (n_query != n_query[0]).any()):
        order = np.lexsort((table.arrival[rows], n_query, ~decodes))
        rows, n_query, decodes = rows[order], n_query[order], decodes[order]
    starts = table.computed[rows]
    ends = starts + n_query
    writes, copies = space.unshare(rows, starts)
    parts = [
        [columns, group.grow(rows, ends, table.limit[rows])]
        for group, columns in zip(space.groups, writes, strict=True)
    ]
    admitted = _renew(state, rows, parts) if table.renewed else []
    sample_row = table.enqueue(rows, ends, n_query if steady else np.where(decodes, n_query, 1).astype(np.int32))
    sample_request = rows[sample_row]
    entered = [] if steady else _enter(state, rows[~decodes])
    # The first tokens of a search are chosen before it has beams to fork into.
    forking = [row for row in table.forking if row not in table.beams]
    for s in np.flatnonzero(np.isin(sample_request, forking)) if forking else ():
        twins = _fork(state, int(sample_request[s]), admitted, parts)
        sample_row = np.append(sample_row, np.full(twins.size, sample_row[s]))
        sample_request = np.append(sample_request, twins)
    want = np.zeros(rows.size, np.uint8)
    want[sample_row] = Want.SAMPLE
    probes, pools = _asked(table, rows, starts, ends, want) if table.probing else ([], [])
    late = [row for row, processors in table.processors.items() if not processors.free] if table.processors else []
    plan = StepPlan(
        number=state.step,
        request=rows,
        n_query=n_query,
        start=starts,
        reserve=n_query if not state.drafts else np.where(decodes, ends - table.settled[rows], n_query),
        want=want,
        n_decode=int(np.count_nonzero(decodes)),
        sample_row=sample_row,
        sample_request=sample_request,
        late=np.flatnonzero(np.isin(sample_request, late)).astype(np.int32) if late else NONE,
        admitted=admitted,
        writes=[_joined(columns) for columns in parts],
        copies=copies,
        probes=probes,
        pools=pools,
    )
    if state.graph_rows:
        plan.frame = frame_of(plan, state.graph_rows)
    return InFlight(plan, table.epoch.copy(), entered)


def _renew(state: State, rows: Int32, parts: list[list[Columns]]) -> list[Admitted]:
    """The device state of those `rows` whose tokens, or whose table rows, the device does not know."""
    table = state.table
    planned, moved = np.zeros((2, table.status.size), np.bool_)
    planned[rows] = True
    renewed = [row for row in table.renewed if planned[row]]
    moved[[row for row in renewed if table.renewed.pop(row)]] = True
    for columns, group in zip(parts, state.space.groups, strict=True):
        # All entries of these rows follow, so none of theirs may stay in other columns.
        columns[:] = [_without(part, moved) for part in columns]
        columns += [group.entries(row) for row in np.flatnonzero(moved).tolist()]
    return [_announce(table, row, int(table.computed[row])) for row in renewed]


def _without(columns: Columns, moved: NDArray[np.bool_]) -> Columns:
    row, at, granule = columns
    others = ~moved[row]
    return row[others], at[others], granule[others]


def _announce(table: RequestTable, row: int, start: int, fork_of: int = -1) -> Admitted:
    choice = table.choice(row)
    submit = choice.request.submit
    return Admitted(
        index=row,
        tokens=table.tokens[row, : int(table.known[row])].copy(),
        prompt_len=len(choice.request.prompt),
        start=start,
        sampling=submit.sampling,
        choice=choice.number,
        min_new_tokens=submit.min_new_tokens,
        stop_ids=submit.stop_ids,
        fork_of=fork_of,
        masked=choice.processors is not None and bool(choice.processors.hosts),
    )


def _fork(state: State, row: int, admitted: list[Admitted], parts: list[list[Columns]]) -> Int32:
    """Let the choices that share the prompt in `row` run; returns their rows."""
    size = int(state.table.prompt_len[row])
    twins = [twin.row for twin in state.table.fork(state.table.choice(row))]
    for twin in twins:
        state.space.fork(row, twin, size)
        for columns, entries in zip(parts, state.space.entries(twin, size), strict=True):
            columns.append(entries)
        admitted.append(_announce(state.table, twin, size, fork_of=row))
    return np.array(twins, np.int32)


def _enter(state: State, rows: Int32) -> list[Entered]:
    """Offer the prompts of `rows`, as far as they are computed now, to the prefix cache."""
    table, space = state.table, state.space
    entered: list[Entered] = []
    for row in rows.tolist() if space.caching else ():
        content = table.content(row, space.floor(int(table.computed[row])))
        salt = table.choice(row).request.submit.salt
        start = space.enter(salt, content, row)
        if start is not None:
            table.enter(row, content.size)
            entered.append((salt, content, start))
    return entered


def _asked(
    table: RequestTable, rows: Int32, starts: Int32, ends: Int32, want: NDArray[np.uint8]
) -> tuple[list[Probe], list[Pool]]:
    """Requests for log-probabilities and hidden states that `rows`, which compute from `starts` to `ends`, answer:
    of the prompt tokens that follow, and of those that they compute. Notes both in `want`."""
    probes, pools = [], []
    for r in np.flatnonzero(np.isin(rows, list(table.probing))).tolist():
        row, start, end = int(rows[r]), int(starts[r]), int(ends[r])
        request, size = table.choice(row).request, int(table.prompt_len[row])
        if request.report is not None:
            targets = table.tokens[row, start + 1 : min(end + 1, size)]
            if targets.size:
                probes.append(Probe(r, targets.copy(), request.submit.prompt_top))
                want[r] |= Want.LOGPROBS
        if request.submit.pool == "mean" or (request.submit.pool and end == size):
            pools.append(Pool(r, 0 if request.submit.pool == "mean" else end - start - 1))
            want[r] |= Want.HIDDEN
        if request.submit.score and want[r]:
            want[r] = Want.SCORE  # in place of a sample
    return probes, pools


def _joined(columns: list[Columns]) -> TableWrites:
    some = [part for part in columns if part[0].size]
    if not some:
        return TableWrites(NONE, NONE, NONE)
    index, at, granule = (np.concatenate(parts).astype(np.int32) for parts in zip(*some, strict=True))
    return TableWrites(index, at, granule)


class Results:
    """Counts tokens, ends choices that are done or broken, and sends preempted ones back to the queue."""

    def __init__(self, state: State, isolation: FailureIsolation) -> None:
        self._state = state
        self._isolation = isolation

    def take(self, step: InFlight, result: StepResult) -> dict[int, StepEvents]:
        """Read a step; returns its events by owner."""
        plan, table = step.plan, self._state.table
        self._state.totals.steps += 1
        if plan.n_decode < plan.request.size:
            self._take_chunks(step, result)
        failed = [] if result.finite.all() else self._isolation.reject(step, result)
        at = np.flatnonzero((table.epoch == step.epochs)[plan.sample_request] & result.finite)
        stopping: list[int] = []
        if table.processors:
            at = self._tell(plan, at, result, stopping, failed)
        quiet = [
            row for row in table.probing if result.scores is not None or table.choice(row).request.pooled is not None
        ]
        beams, at = _parted(plan, at, table.beams)
        prompts, at = _parted(plan, at, quiet)
        events = self._accept(plan, at, result, stopping)
        if beams.size:
            self._hear(plan, beams, result, events)
        if prompts.size:
            self._answer_prompts(plan, prompts, result, events)
        for choice, error in failed:
            add_error(events, choice, error)
        return events

    def _take_chunks(self, step: InFlight, result: StepResult) -> None:
        """The chunks of a step are written. The tokens of its other rows will tell where these began."""
        plan, table = step.plan, self._state.table
        alive = (table.epoch == step.epochs)[plan.request]
        chunks = np.flatnonzero(alive[plan.n_decode :]) + plan.n_decode
        table.settle(plan.request[chunks], (plan.start + plan.n_query)[chunks])
        if result.probed is not None:
            _note_logprobs(table, plan, alive, result)
        if result.pooled is not None:
            _note_hidden(table, plan, alive, result.pooled)

    def _tell(
        self,
        plan: StepPlan,
        at: NDArray[np.intp],
        result: StepResult,
        stopping: list[int],
        failed: list[tuple[Choice, Reason]],
    ) -> NDArray[np.intp]:
        """Tell logits processors of their rows' tokens; those of `at` that are left.

        Adds the rows whose answers end here to `stopping`. Ends the choices whose processors fail, and adds them to
        `failed`.
        """
        table, fine = self._state.table, np.ones(at.size, np.bool_)
        sampled = enumerate(plan.sample_request[at].tolist())
        for i, row in [(i, row) for i, row in sampled if row in table.processors]:
            processors = table.processors[row]
            for token in result.tokens[_tokens_of(result, at[i : i + 1])[1]].tolist():
                if processors.accept(token):
                    stopping.append(row)
            if processors.error is not None:
                failed.append((table.choice(row), processors.error))
                self._state.fail(*failed[-1])
                fine[i] = False
        return at[fine]

    def _accept(
        self, plan: StepPlan, at: NDArray[np.intp], result: StepResult, stopping: list[int]
    ) -> dict[int, StepEvents]:
        """Count the tokens of the samples `at`, of which those of the rows `stopping` end their choices; the events.

        Of a sample's tokens those behind the first that ends its choice do not count.
        """
        state, table, rows = self._state, self._state.table, plan.sample_request[at]
        of, which, nth = _tokens_of(result, at)
        row, tokens = rows[of], result.tokens[which]
        place = table.known[row] + nth
        table.tokens[row, place] = tokens
        produced = place + 1 - table.prompt_len[row]
        stop_ids = table.stops[row]
        stops = (stop_ids == tokens[:, None]).any(axis=1)
        for i in np.flatnonzero(stop_ids[:, -1] != NO_TOKEN):
            stops[i] = int(tokens[i]) in table.choice(int(row[i])).request.submit.stop_ids
        stops &= produced > table.min_new[row]
        if stopping:
            stops |= np.isin(row, stopping)
        finish = np.where(produced >= table.max_new[row], LENGTH, 0).astype(np.int32)
        finish[stops] = STOP
        accepted = Accepted(rows, tokens, finish, which)
        if result.counts is None:
            table.accept(rows, place + 1)
        else:
            accepted = self._count(plan, at, accepted, result.counts[at])
        state.totals.output_tokens += accepted.tokens.size
        self._isolation.passed(accepted.rows)
        events = _by_owner(accepted, table, result)
        for ending in accepted.rows[accepted.finish > 0].tolist():
            state.estimator.observe(int(table.known[ending] - table.prompt_len[ending]))
            state.end(table.choice(ending))
        left = (table.status[rows] == LEAVING) & (table.known[rows] == table.length[rows])
        for leaving in rows[left].tolist():
            state.requeue(leaving)
        return events

    def _count(self, plan: StepPlan, at: NDArray[np.intp], read: Accepted, counts: Int32) -> Accepted:
        """Of samples with any number of tokens, what counts: `read` has one finish for each token, the result one for
        each row. Slots beyond those that a row may come to need soon are given back."""
        table, of = self._state.table, np.repeat(np.arange(counts.size), counts)
        ends: Int64 = np.concatenate(([0], np.cumsum(read.finish > 0)))  # before each token, how many end a choice
        kept: NDArray[np.bool_] = ends[:-1] == np.repeat(ends[np.cumsum(counts) - counts], counts)
        n = np.bincount(of[kept], minlength=counts.size).astype(np.int32)
        rows, most = read.rows, np.where(plan.sample_row < plan.n_decode, plan.n_query[plan.sample_row], 1)[at]
        table.accept(rows, table.known[rows] + n, most - counts)
        running = rows[table.status[rows] == RUNNING]
        self._state.space.trim(running, table.computed[running] + RUN_TOKENS)
        some = n > 0
        last = (np.cumsum(n) - 1)[some]
        return Accepted(rows[some], read.tokens[kept], read.finish[kept][last], read.which[kept], n[some])

    # --- beam searches -----------------------------------------------------------------------------------------
    # A beam runs like any other choice, but after each of its tokens it waits until all beams of its request have
    # been heard. Then the search says how each of them goes on. A sequence that goes on twice is copied by its table
    # row. The tokens that the device drew do not count: it is told of every beam's tokens with the beam's next row.

    def _hear(self, plan: StepPlan, at: NDArray[np.intp], result: StepResult, events: dict[int, StepEvents]) -> None:
        """The samples `at` of a step are beams', one token each; adds the answers of searches that end."""
        table, rows = self._state.table, plan.sample_request[at]
        table.settle(rows, table.computed[rows])  # a beam has one step in flight at most
        for row, token in zip(rows.tolist(), _tokens_of(result, at)[1].tolist(), strict=True):
            assert result.top_ids is not None and result.top_logprobs is not None
            choice, beams = table.choice(row), table.beams[row]
            most = int(table.tops[row])
            if beams.hear(choice.number, result.top_ids[token, :most], result.top_logprobs[token, :most]):
                children = beams.choose()
                if children is None:
                    self._answer(choice, beams, events)
                else:
                    self._go_on(choice.request, children)

    def _answer(self, choice: Choice, beams: Beams, events: dict[int, StepEvents]) -> None:
        """The search of `choice` is over. Its answers are those of the request's choices."""
        request, logprobs, answers = choice.request, beams.submit.sampling.logprobs, beams.answers()
        for number, answer in enumerate(answers):
            path = answer.path.tokens()
            told = [one.logprob for one in path] if logprobs is not None else []
            mine, i = _add_row(events, request, number, answer.finish, [one.token for one in path], told)
            mine.cached[i] = request.cached
            if logprobs:
                mine.top[i] = [list(one.top) for one in path]
            if number == 0:
                _add_report(mine, i, request)
            self._state.totals.output_tokens += len(path)
        self._state.estimator.observe(answers[0].path.length)
        self._state.end(choice)

    def _go_on(self, request: Request, children: list[Continuation]) -> None:
        """Let every beam go on as `children` say, by its number."""
        space, table = self._state.space, self._state.table
        if request.choices[0].forks:
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

    # --- prompts -----------------------------------------------------------------------------------------------

    def _answer_prompts(
        self, plan: StepPlan, at: NDArray[np.intp], result: StepResult, events: dict[int, StepEvents]
    ) -> None:
        """The samples `at` are of requests for a score or a hidden state: they end, and no token of theirs counts."""
        for sample, row in zip(at.tolist(), plan.sample_request[at].tolist(), strict=True):
            choice = self._state.table.choice(row)
            request = choice.request
            mine, i = _add_row(events, request, choice.number, Finish.STOP)
            mine.cached[i] = request.cached
            if result.scores is not None:
                mine.scores[i] = result.scores[sample].tolist()
            if request.pooled is not None:
                count = len(request.prompt) if request.submit.pool == "mean" else 1
                mine.pooled[i] = (request.pooled / count).astype("<f4").tobytes()
            self._state.end(choice)


def _parted(plan: StepPlan, at: NDArray[np.intp], rows: Collection[int]) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Of the samples `at` those of `rows`, and the others."""
    if not rows:
        return at[:0], at
    mine = np.isin(plan.sample_request[at], [*rows])
    return at[mine], at[~mine]


# --- events ----------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Accepted:
    """Tokens that were read. The table counts them already, and the rows still are their choices'."""

    rows: Int32
    """[R]"""
    tokens: Int32
    """[T] one row's after the other's."""
    finish: Int32
    """[R] a Finish."""
    which: NDArray[np.intp]
    """[T] the token's number in the step's result."""
    counts: Int32 | int = 1
    """[R] tokens of each row; 1: one of each."""

    @property
    def of(self) -> NDArray[np.intp]:
        """[T] the number of the token's row."""
        return np.repeat(np.arange(self.rows.size), self.counts)

    def part(self, mine: NDArray[np.bool_]) -> Accepted:
        """The part of some rows."""
        some, counts = mine[self.of], np.full(self.rows.size, self.counts)[mine]
        return Accepted(self.rows[mine], self.tokens[some], self.finish[mine], self.which[some], counts)


def _tokens_of(
    result: StepResult, at: NDArray[np.intp]
) -> tuple[NDArray[np.intp] | slice, NDArray[np.intp], NDArray[np.intp] | int]:
    """The tokens of the samples `at`, as columns: a sample's place in `at`, the token's number in the result, and its
    number among those of its sample."""
    if result.counts is None:
        return slice(None), at, 0
    counts = result.counts[at]
    of = np.repeat(np.arange(at.size), counts)
    nth = np.arange(of.size) - np.repeat(np.cumsum(counts) - counts, counts)
    return of, (np.cumsum(result.counts) - result.counts)[at][of] + nth, nth


def _by_owner(accepted: Accepted, table: RequestTable, result: StepResult) -> dict[int, StepEvents]:
    """The events of one step for each owner."""
    owners = table.owner[accepted.rows]
    if not owners.size:
        return {}
    if (owners == owners[0]).all():
        return {int(owners[0]): _events(accepted, table, result)}
    return {int(owner): _events(accepted.part(owners == owner), table, result) for owner in np.unique(owners)}


def add_error(events: dict[int, StepEvents], choice: Choice, error: Reason) -> None:
    """`choice`, and all choices that it still stands for, end with `error`."""
    request = choice.request
    first, count = (choice.number, choice.places) if request.beams is None else (0, request.submit.n)
    for number in range(first, first + count):
        mine, i = _add_row(events, request, number, Finish.ERROR)
        mine.error[i] = error


def _add_row(
    events: dict[int, StepEvents],
    request: Request,
    number: int,
    finish: Finish,
    tokens: Sequence[int] = (),
    logprobs: Sequence[float] = (),
) -> tuple[StepEvents, int]:
    """Adds a row for choice `number` to the events of the request's owner. Returns these, and the row's number."""
    empty = StepEvents(stamp=time.monotonic(), request=[], choice=[], count=[], tokens=[], finish=[])
    mine = events.setdefault(request.owner, empty)
    if logprobs or mine.logprobs:
        mine.logprobs = mine.logprobs or [0.0] * len(mine.tokens)
        mine.logprobs += logprobs or [0.0] * len(tokens)
    mine.request.append(request.submit.id)
    mine.choice.append(number)
    mine.count.append(len(tokens))
    mine.tokens += tokens
    mine.finish.append(finish)
    return mine, len(mine.request) - 1


def _events(accepted: Accepted, table: RequestTable, result: StepResult) -> StepEvents:
    rows = accepted.rows
    events = StepEvents(
        stamp=time.monotonic(),
        request=table.request[rows].tolist(),
        choice=table.number[rows].tolist(),
        count=np.full(rows.size, accepted.counts).tolist(),
        tokens=accepted.tokens.tolist(),
        finish=accepted.finish.tolist(),
    )
    for i in np.flatnonzero(table.known[rows] == table.prompt_len[rows] + accepted.counts).tolist():
        row = int(rows[i])
        events.cached[i] = table.choice(row).request.cached
        if row in table.probing:
            table.probing.discard(row)
            _add_report(events, i, table.choice(row).request)
    if result.logprobs is not None and (table.tops[rows] >= 0).any():
        _add_logprobs(events, accepted, table.tops[rows], result.logprobs, result)
    return events


def _add_report(events: StepEvents, i: int, request: Request) -> None:
    """Row `i` brings the log-probabilities of its request's prompt, if they are wanted."""
    report, request.report = request.report, None
    if report is None:
        return
    events.prompt_logprobs[i] = report.logprobs.tolist()
    events.prompt_ranks[i] = report.ranks.tolist()
    if request.submit.prompt_top:
        places = zip(report.top_ids.tolist(), report.top_logprobs.tolist(), strict=True)
        events.prompt_top[i] = [list(zip(ids, logprobs, strict=True)) for ids, logprobs in places]


def _add_logprobs(
    events: StepEvents, accepted: Accepted, tops: Int32, logprobs: NDArray[np.float32], result: StepResult
) -> None:
    of, which = accepted.of, accepted.which
    events.logprobs = np.where(tops[of] >= 0, logprobs[which], 0.0).tolist()
    if result.top_ids is None or result.top_logprobs is None:
        return
    for i in np.flatnonzero(tops[of] > 0):
        k, at = int(tops[of[i]]), int(which[i])
        best = zip(result.top_ids[at, :k].tolist(), result.top_logprobs[at, :k].tolist(), strict=True)
        events.top.setdefault(int(of[i]), []).append(list(best))


def _note_hidden(table: RequestTable, plan: StepPlan, alive: NDArray[np.bool_], pooled: NDArray[np.float32]) -> None:
    """Put a step's hidden states to those of its requests' other chunks; `alive`: rows that are still theirs."""
    for pool, state in zip(plan.pools, pooled, strict=True):
        if alive[pool.row]:
            request = table.choice(int(plan.request[pool.row])).request
            # A request that was sent back computes its whole prompt again.
            first = request.pooled is None or request.submit.pool == "last" or not plan.start[pool.row]
            request.pooled = state.copy() if first else request.pooled + state


def _note_logprobs(table: RequestTable, plan: StepPlan, alive: NDArray[np.bool_], result: StepResult) -> None:
    """Put the log-probabilities of prompts to those of their other chunks; `alive`: rows that are still theirs."""
    assert result.probed is not None and result.probed_ranks is not None
    at = 0
    for probe in plan.probes:
        end, start = at + probe.targets.size, int(plan.start[probe.row])
        report = table.choice(int(plan.request[probe.row])).request.report if alive[probe.row] else None
        if report is not None:
            known = slice(start, start + probe.targets.size)
            report.logprobs[known] = result.probed[at:end]
            report.ranks[known] = result.probed_ranks[at:end]
            if result.probed_top_ids is not None and result.probed_top_logprobs is not None:
                report.top_ids[known] = result.probed_top_ids[at:end, : probe.top]
                report.top_logprobs[known] = result.probed_top_logprobs[at:end, : probe.top]
        at = end
