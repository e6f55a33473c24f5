"""Steps in flight: the plan that a set of rows becomes, and what changes when its results were read.

The tokens of a step that was read are counted, choices end, and events tell the owners.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import compress

import numpy as np
from numpy.typing import NDArray

from llmcore.api.bridge import Finish, StepEvents
from llmcore.api.protocols import Int32, Int64
from llmcore.kv.slots import RUN_TOKENS
from llmcore.kv.space import NO_GRANULES, Columns
from llmcore.sched.beam_search import Beams, Child, Ended
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
from llmcore.sched.release import NOT_FINITE, FailureIsolation, Release
from llmcore.sched.request import LEAVING, RUNNING, Choice, Request, RequestTable, State

STOP, LENGTH = int(Finish.STOP), int(Finish.LENGTH)


def enqueue(state: State, rows: Int32, n_query: Int32, placed: Sequence[Choice]) -> InFlight:
    """Make the plan of a step in which `rows` compute `n_query` tokens each; slots have been secured.

    From here on these tokens count as computed, and the most that a row can give as part of its sequence, before
    the host has read what it gave.
    """
    table, space = state.table, state.space
    decodes = table.computed[rows] >= table.prefill[rows]
    if not decodes.all() or (state.drafts and (n_query != n_query[0]).any()):
        order = np.lexsort((table.arrival[rows], n_query, ~decodes))
        rows, n_query, decodes = rows[order], n_query[order], decodes[order]
    starts = table.computed[rows]
    ends = starts + n_query
    writes, copies = space.unshare(rows, starts)
    parts = [[columns] for columns in writes]
    for group, columns in zip(space.groups, parts, strict=True):
        columns.append(group.grow(rows, ends, table.limit[rows]))
    admitted = [_admit(state, choice, parts) for choice in placed]
    if table.renewed:
        admitted += _renew(state, rows, parts)
    sample_row = table.enqueue(rows, ends).astype(np.int32)
    sample_request = rows[sample_row]
    entered = [] if decodes.all() else _enter(state, rows[~decodes])
    forking = np.flatnonzero(table.forks[sample_request])
    if table.beams:
        # the first tokens of a search are chosen before it has beams to fork into
        forking = forking[~np.isin(sample_request[forking], list(table.beams))]
    if forking.size:
        born = [_fork(state, int(row), admitted, parts) for row in sample_request[forking]]
        sample_row = np.concatenate([sample_row, np.repeat(sample_row[forking], [len(b) for b in born])])
        sample_request = np.concatenate([sample_request, *born])
    n_decode = int(np.count_nonzero(decodes))
    most: Int32 | int = 1
    if state.drafts:
        most = np.where(sample_row < n_decode, n_query[sample_row], 1)
    table.sample(sample_request, most)
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
        n_decode=n_decode,
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
    return InFlight(plan, table.epoch[rows], table.epoch[sample_request], entered)


def _admit(state: State, choice: Choice, parts: list[list[Columns]]) -> Admitted:
    start = int(state.table.taken[choice.row])
    for columns, entries in zip(parts, state.space.entries(choice.row, start), strict=True):
        columns.append(entries)
    return _announce(choice, choice.tokens(), start)


def _renew(state: State, rows: Int32, parts: list[list[Columns]]) -> list[Admitted]:
    """The device state of those `rows` whose tokens, or whose table rows, the device does not know."""
    table = state.table
    admitted = []
    moved = [row for row in rows.tolist() if table.renewed.get(row)]
    for columns, group in zip(parts, state.space.groups, strict=True) if moved else ():
        # All entries of these rows follow, so none of theirs may stay in other columns.
        columns[:] = [_without(part, moved) for part in columns] + [group.entries(row) for row in moved]
    for row in rows[np.isin(rows, list(table.renewed))].tolist():
        del table.renewed[row]
        tokens = table.tokens[row, : int(table.known[row])].copy()
        admitted.append(_announce(table.choice(row), tokens, int(table.computed[row])))
    return admitted


def _without(columns: Columns, rows: list[int]) -> Columns:
    row, at, granule = columns
    others = ~np.isin(row, rows)
    return row[others], at[others], granule[others]


def _announce(choice: Choice, tokens: Int32, start: int, fork_of: int = -1) -> Admitted:
    submit = choice.request.submit
    return Admitted(
        index=choice.row,
        tokens=tokens,
        prompt_len=len(choice.request.prompt),
        start=start,
        sampling=submit.sampling,
        choice=submit.choice + choice.number,
        min_new_tokens=submit.min_new_tokens,
        stop_ids=submit.stop_ids,
        fork_of=fork_of,
        masked=choice.processors is not None and bool(choice.processors.hosts),
    )


def _fork(state: State, row: int, admitted: list[Admitted], parts: list[list[Columns]]) -> Int32:
    """Let the choices that share the prompt in `row` run; returns their rows."""
    choice = state.table.choice(row)
    prompt = choice.request.prompt.ids
    twins = state.table.fork(choice)
    for twin in twins:
        state.space.fork(row, twin.row, prompt.size)
        for columns, entries in zip(parts, state.space.entries(twin.row, prompt.size), strict=True):
            columns.append(entries)
        admitted.append(_announce(twin, prompt, prompt.size, fork_of=row))
    return np.array([twin.row for twin in twins], np.int32)


def _enter(state: State, rows: Int32) -> list[Entered]:
    """Offer the prompts of `rows`, as far as they are computed now, to the prefix cache."""
    table, space = state.table, state.space
    entered = []
    for row in rows.tolist() if space.caching else ():
        content = table.content(row, space.floor(int(table.computed[row])))
        salt = table.choice(row).request.submit.salt
        start = space.enter(salt, content, row)
        if start is not None:
            table.enter(row, content.size)
            entered.append(Entered(salt, content, start))
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
        return TableWrites(NO_GRANULES, NO_GRANULES, NO_GRANULES)
    index, at, granule = (np.concatenate(parts).astype(np.int32) for parts in zip(*some, strict=True))
    return TableWrites(index, at, granule)


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
        if plan.n_decode < plan.request.size:
            self._settle(step)
        if plan.probes or plan.pools:
            _note(table, plan, table.epoch[plan.request] == step.row_epoch, result)
        rejected = self._isolation.reject(step, result) if not result.finite.all() else []
        at = np.flatnonzero((table.epoch[plan.sample_request] == step.sample_epoch) & result.finite)
        if table.processors:
            at, ends, failed = self._tell(at, plan.sample_request[at], result)
        else:
            ends, failed = None, []
        beams = at[:0]
        if table.beams:
            searched = np.isin(plan.sample_request[at], list(table.beams))
            beams, at = at[searched], at[~searched]
            ends = None if ends is None else ends[~searched]
        rows, events = self._accept(plan, at, result, stamp, ends)
        if beams.size:
            self._hear(plan.sample_request[beams], beams, result, events, stamp)
        add_errors(events, rejected, NOT_FINITE, stamp)
        for choice, error in failed:
            add_errors(events, [choice], error, stamp)
        return rows, events

    def _settle(self, step: InFlight) -> None:
        """The chunks of a step that was read are written. The tokens of its other rows will tell where these began."""
        plan, table, chunks = step.plan, self._state.table, slice(step.plan.n_decode, None)
        alive = table.epoch[plan.request[chunks]] == step.row_epoch[chunks]
        table.settle(plan.request[chunks][alive], (plan.start[chunks] + plan.n_query[chunks])[alive])

    def _tell(
        self, at: NDArray[np.intp], rows: Int32, result: StepResult
    ) -> tuple[NDArray[np.intp], NDArray[np.bool_], list[tuple[Choice, Reason]]]:
        """Tell logits processors of their rows' tokens; end the rows of those that fail.

        Returns which of `at` are left, which of these end with their token, and (choice, error) of the others.
        """
        table = self._state.table
        ends, fine = np.zeros(at.size, np.bool_), np.ones(at.size, np.bool_)
        failed = []
        for i, row in enumerate(rows.tolist()):
            processors = table.processors.get(row)
            if processors is None:
                continue
            for token in result.tokens[_tokens_of(result, at[i : i + 1])[1]].tolist():
                ends[i] = processors.accept(token)
            if processors.error is not None:
                choice = table.choice(row)
                self._release.fail(choice, processors.error)
                failed.append((choice, processors.error))
                fine[i] = False
        return at[fine], ends[fine], failed

    def _accept(
        self,
        plan: StepPlan,
        at: NDArray[np.intp],
        result: StepResult,
        stamp: float,
        ends: NDArray[np.bool_] | None,
    ) -> tuple[Int32, dict[int, StepEvents]]:
        """Count the tokens of the samples `at`, of which `ends` end their choices; the rows that have any, and events.

        Of a sample's tokens those behind the first that ends its choice do not count.
        """
        table, rows = self._state.table, plan.sample_request[at]
        of, which, nth = _tokens_of(result, at)
        row, tokens = rows[of], result.tokens[which]
        place = table.known[row] if result.counts is None else table.known[row] + nth
        table.write(row, place, tokens)
        known = place + 1
        produced = known - table.prompt_len[row]
        stops = (table.stops[row] == tokens[:, None]).any(axis=1)
        for i in np.flatnonzero(table.many_stops[row]):
            stops[i] = int(tokens[i]) in table.choice(int(row[i])).request.submit.stop_ids
        stops &= produced > table.min_new[row]
        stops |= result.scores is not None
        if ends is not None:
            stops |= ends[of]
        finish = np.where(produced >= table.max_new[row], LENGTH, 0).astype(np.int32)
        finish[stops] = STOP
        accepted = Accepted(rows, tokens, finish, which)
        if result.counts is None:
            table.accept(rows, known)
        else:
            accepted = self._count(plan, at, accepted, result.counts[at])
        self._state.totals.output_tokens += accepted.tokens.size if result.scores is None else 0
        events = _by_owner(accepted, table, result, stamp)
        if result.pooled is not None:
            self._state.totals.output_tokens -= sum(len(mine.pooled) for mine in events.values())
        for i in np.flatnonzero(accepted.finish):
            ending = int(accepted.rows[i])
            self._state.estimator.observe(int(table.known[ending] - table.prompt_len[ending]))
            self._release.end(table.choice(ending))
        left = (table.status[rows] == LEAVING) & (table.known[rows] == table.length[rows])
        for leaving in rows[left].tolist():
            self._state.preempt(leaving)
        return accepted.rows, events

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

    def _hear(
        self, rows: Int32, at: NDArray[np.intp], result: StepResult, events: dict[int, StepEvents], stamp: float
    ) -> None:
        """`rows` of beams are the samples `at` of a step, one token each; adds the answers of searches that end."""
        assert result.top_ids is not None and result.top_logprobs is not None
        table = self._state.table
        table.settle(rows, table.computed[rows])  # a beam has one step in flight at most
        for row, token in zip(rows.tolist(), _tokens_of(result, at)[1].tolist(), strict=True):
            choice, beams = table.choice(row), table.beams[row]
            most = int(table.tops[row])
            if beams.hear(choice.number, result.top_ids[token, :most], result.top_logprobs[token, :most]):
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
    counts: Int32 | None = None
    """[R] tokens of each row; None: one of each."""

    @property
    def of(self) -> NDArray[np.intp]:
        """[T] the number of the token's row."""
        n = np.arange(self.rows.size)
        return n if self.counts is None else np.repeat(n, self.counts)

    def part(self, mine: NDArray[np.bool_]) -> Accepted:
        """The part of some rows."""
        some = mine[self.of]
        counts = None if self.counts is None else self.counts[mine]
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


def _by_owner(accepted: Accepted, table: RequestTable, result: StepResult, stamp: float) -> dict[int, StepEvents]:
    """The events of one step for each owner."""
    owners = table.owner[accepted.rows]
    if not owners.size:
        return {}
    if (owners == owners[0]).all():
        return {int(owners[0]): _events(accepted, table, result, stamp)}
    return {int(owner): _events(accepted.part(owners == owner), table, result, stamp) for owner in np.unique(owners)}


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
        if number == 0 and request.report is not None:
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
        count=[1] * rows.size if accepted.counts is None else accepted.counts.tolist(),
        tokens=accepted.tokens.tolist(),
        finish=accepted.finish.tolist(),
    )
    n = 1 if accepted.counts is None else accepted.counts
    for i in np.flatnonzero(table.known[rows] == table.prompt_len[rows] + n):
        request = table.choice(int(rows[i])).request
        events.cached[int(i)] = request.cached
        if int(rows[i]) in table.probing:
            _add_prompt(events, int(i), request)
            table.probing.discard(int(rows[i]))
    if result.scores is not None:
        events.count, events.tokens = [0] * rows.size, []
        events.scores = dict(enumerate(result.scores[accepted.which].tolist()))
    if result.logprobs is not None:
        _add_logprobs(events, accepted, table.tops[rows], result)
    return _without_tokens(events) if events.pooled else events


def _add_prompt(events: StepEvents, i: int, request: Request) -> None:
    """Row `i` brings what its request wants of its prompt."""
    report = request.report
    request.report = None
    if report is not None:
        events.prompt_logprobs[i] = report.logprobs.tolist()
        events.prompt_ranks[i] = report.ranks.tolist()
    if report is not None and request.submit.prompt_top:
        places = zip(report.top_ids.tolist(), report.top_logprobs.tolist(), strict=True)
        events.prompt_top[i] = [list(zip(ids, logprobs, strict=True)) for ids, logprobs in places]
    if request.pooled is not None:
        count = len(request.prompt) if request.submit.pool == "mean" else 1
        events.pooled[i] = (request.pooled / count).astype("<f4").tobytes()


def _without_tokens(events: StepEvents) -> StepEvents:
    """A row that brings a hidden state has sampled a token, too, which its request does not want."""
    kept = [i not in events.pooled for i in range(len(events.count))]
    events.tokens = list(compress(events.tokens, kept))
    events.logprobs = list(compress(events.logprobs, kept))
    events.count = [int(keep) for keep in kept]
    events.finish = [finish if keep else Finish.STOP for finish, keep in zip(events.finish, kept, strict=True)]
    return events


def _add_logprobs(events: StepEvents, accepted: Accepted, tops: Int32, result: StepResult) -> None:
    assert result.logprobs is not None
    if not (tops >= 0).any():
        return
    of, which = accepted.of, accepted.which
    events.logprobs = np.where(tops[of] >= 0, result.logprobs[which], 0.0).tolist()
    if result.top_ids is None or result.top_logprobs is None:
        return
    for i in np.flatnonzero(tops[of] > 0):
        k, at = int(tops[of[i]]), int(which[i])
        best = zip(result.top_ids[at, :k].tolist(), result.top_logprobs[at, :k].tolist(), strict=True)
        events.top.setdefault(int(of[i]), []).append(list(best))


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
