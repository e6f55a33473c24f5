"""Steps in flight, which were enqueued and not read yet, and the plan that a set of rows becomes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from llmcore.api.protocols import Int32, Int64
from llmcore.kv.group import NO_GRANULES
from llmcore.kv.space import Columns
from llmcore.sched.plan import NONE, Admitted, Pool, Probe, StepPlan, TableWrites, Want, frame_of
from llmcore.sched.request import Choice, RequestTable, State


@dataclass(frozen=True)
class Entered:
    """`content` went into the prefix cache under `salt`, new from token `start` on."""

    salt: bytes
    content: Int64
    start: int


@dataclass(slots=True)
class InFlight:
    """A step in flight: its plan, the epochs of its rows when it was made, and what it put into the prefix cache."""

    plan: StepPlan
    row_epoch: Int64
    sample_epoch: Int64
    entered: list[Entered] = field(default_factory=list)


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
        prompt_len=choice.request.prompt.size,
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
    choice = state.table.choice(row)
    prompt = choice.request.prompt
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
        if request.prompt_logprobs is not None:
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
