"""Steps that were enqueued and not read yet, and the plan that a set of rows becomes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from llmcore.kv.group import NO_GRANULES
from llmcore.kv.space import Columns
from llmcore.protocols import Int32, Int64
from llmcore.sched.job import Job
from llmcore.sched.plan import Admitted, StepPlan, TableWrites, Want
from llmcore.sched.probes import asked
from llmcore.sched.state import State


@dataclass(frozen=True)
class Entered:
    """`content` went into the cache under `salt`, new from token `start` on."""

    salt: bytes
    content: Int64
    start: int


@dataclass(frozen=True)
class Flight:
    """A step on its way: its plan, who had its places when it was made, and what it put into the cache."""

    plan: StepPlan
    row_epoch: Int64
    sample_epoch: Int64
    entered: list[Entered] = field(default_factory=list)


def enqueue(state: State, rows: Int32, n_query: Int32, placed: Sequence[Job]) -> Flight:
    """Make the plan of a step in which `rows` compute `n_query` tokens each; slots have been secured.

    From here on these tokens count as computed, and each sampled one as part of its sequence, though nobody has
    read it yet.
    """
    table, space = state.table, state.space
    decodes = table.computed[rows] >= table.prefill[rows]
    if not decodes.all():
        order = np.lexsort((table.arrival[rows], n_query, ~decodes))
        rows, n_query, decodes = rows[order], n_query[order], decodes[order]
    starts = table.computed[rows]
    ends = starts + n_query
    writes, copies = space.unshare(rows, starts)
    parts = [[columns] for columns in writes]
    for group, columns in zip(space.groups, parts, strict=True):
        columns.append(group.grow(rows, ends, table.limit[rows]))
    admitted = [_admit(state, job, parts) for job in placed]
    if table.renewed:
        admitted += _renew(state, rows, parts)
    table.computed[rows] = ends
    sample_row = np.flatnonzero(ends == table.length[rows]).astype(np.int32)
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
    table.length[sample_request] += 1
    want = np.zeros(rows.size, np.uint8)
    want[sample_row] = Want.SAMPLE
    probes, pools = asked(table, rows, starts, ends) if table.probing else ([], [])
    for probe in probes:
        want[probe.row] |= Want.LOGPROBS
    for pool in pools:
        want[pool.row] |= Want.HIDDEN
    plan = StepPlan(
        number=state.step,
        request=rows,
        n_query=n_query,
        start=starts,
        want=want,
        n_decode=int(np.count_nonzero(decodes)),
        sample_row=sample_row,
        sample_request=sample_request,
        admitted=admitted,
        writes=[_joined(columns) for columns in parts],
        copies=copies,
        probes=probes,
        pools=pools,
    )
    return Flight(plan, table.epoch[rows], table.epoch[sample_request], entered)


def _admit(state: State, job: Job, parts: list[list[Columns]]) -> Admitted:
    start = int(state.table.taken[job.row])
    for columns, entries in zip(parts, state.space.entries(job.row, start), strict=True):
        columns.append(entries)
    return _announce(job, job.tokens(), start)


def _renew(state: State, rows: Int32, parts: list[list[Columns]]) -> list[Admitted]:
    """What the device has to be told of those `rows` whose tokens, or whose table rows, were dealt out anew."""
    table = state.table
    admitted = []
    moved = [row for row in rows.tolist() if table.renewed.get(row)]
    for columns, group in zip(parts, state.space.groups, strict=True) if moved else ():
        # All entries of theirs follow, so none that is in other columns may stay there.
        columns[:] = [_without(part, moved) for part in columns] + [group.entries(row) for row in moved]
    for row in rows[np.isin(rows, list(table.renewed))].tolist():
        del table.renewed[row]
        tokens = table.tokens[row, : int(table.known[row])].copy()
        admitted.append(_announce(table.job(row), tokens, int(table.computed[row])))
    return admitted


def _without(columns: Columns, rows: list[int]) -> Columns:
    row, at, granule = columns
    others = ~np.isin(row, rows)
    return row[others], at[others], granule[others]


def _announce(job: Job, tokens: Int32, start: int, fork_of: int = -1) -> Admitted:
    return Admitted(
        index=job.row,
        tokens=tokens,
        prompt_len=job.prompt.size,
        start=start,
        sampling=job.submit.sampling,
        choice=job.choice,
        min_new_tokens=job.submit.min_new_tokens,
        stop_ids=job.submit.stop_ids,
        fork_of=fork_of,
        bound=job.bound,
    )


def _fork(state: State, row: int, admitted: list[Admitted], parts: list[list[Columns]]) -> Int32:
    table, job = state.table, state.table.job(row)
    size = job.prompt.size
    places, job.reserved = job.reserved, []
    for choice, place in enumerate(places, start=1):
        twin = job.fork(choice, place)
        table.fork(row, twin)
        state.requests[twin.owner, twin.submit.id][choice] = twin
        state.space.fork(row, place, size)
        for columns, entries in zip(parts, state.space.entries(place, size), strict=True):
            columns.append(entries)
        admitted.append(_announce(twin, job.prompt, size, fork_of=row))
    job.forks = 0
    table.forks[row] = 0
    return np.array(places, np.int32)


def _enter(state: State, rows: Int32) -> list[Entered]:
    table, space = state.table, state.space
    entered = []
    for row in rows.tolist() if space.caching else ():
        content = table.content(row, space.floor(int(table.computed[row])))
        salt = table.job(row).submit.salt
        start = space.enter(salt, content, row)
        if start is not None:
            table.entered[row] = content.size
            entered.append(Entered(salt, content, start))
    return entered


def _joined(columns: list[Columns]) -> TableWrites:
    some = [part for part in columns if part[0].size]
    if not some:
        return TableWrites(NO_GRANULES, NO_GRANULES, NO_GRANULES)
    index, at, granule = (np.concatenate(parts).astype(np.int32) for parts in zip(*some, strict=True))
    return TableWrites(index, at, granule)
