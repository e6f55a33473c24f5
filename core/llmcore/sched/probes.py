"""What requests want of their prompts beside tokens: log-probabilities, hidden states."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from llmcore.protocols import Int32
from llmcore.sched.plan import Pool, Probe, StepPlan, StepResult
from llmcore.sched.table import RequestTable


def asked(table: RequestTable, rows: Int32, starts: Int32, ends: Int32) -> tuple[list[Probe], list[Pool]]:
    """What `rows` that compute from `starts` to `ends` are asked for: log-probabilities of the prompt tokens that
    follow what they compute, and hidden states of prompt tokens that they compute."""
    probes, pools = [], []
    for r in np.flatnonzero(np.isin(rows, list(table.probing))).tolist():
        row, start, end = int(rows[r]), int(starts[r]), int(ends[r])
        job, size = table.job(row), int(table.prompt_len[row])
        if job.prompt_logprobs is not None:
            targets = table.tokens[row, start + 1 : min(end + 1, size)]
            if targets.size:
                probes.append(Probe(r, targets.copy(), job.submit.prompt_top))
        if job.submit.pool == "mean":
            pools.append(Pool(r, 0))
        elif job.submit.pool and end == size:
            pools.append(Pool(r, end - start - 1))
    return probes, pools


def note(table: RequestTable, plan: StepPlan, alive: NDArray[np.bool_], result: StepResult) -> None:
    """Put a step's answers where those of its requests' other chunks are; `alive`: rows that are still theirs."""
    if result.probed is not None:
        _note_logprobs(table, plan, alive, result)
    if result.pooled is None:
        return
    for pool, state in zip(plan.pools, result.pooled, strict=True):
        if alive[pool.row]:
            job = table.job(int(plan.request[pool.row]))
            # A request that was sent back computes its whole prompt again.
            first = job.pooled is None or job.submit.pool == "last" or not plan.start[pool.row]
            job.pooled = state.copy() if first else job.pooled + state


def _note_logprobs(table: RequestTable, plan: StepPlan, alive: NDArray[np.bool_], result: StepResult) -> None:
    assert result.probed is not None
    at = 0
    for probe in plan.probes:
        end = at + probe.targets.size
        job = table.job(int(plan.request[probe.row])) if alive[probe.row] else None
        if job is not None and job.prompt_logprobs is not None:
            start = int(plan.start[probe.row])
            known = slice(start, start + probe.targets.size)
            job.prompt_logprobs[known] = result.probed[at:end]
            if job.prompt_ranks is not None and result.probed_ranks is not None:
                job.prompt_ranks[known] = result.probed_ranks[at:end]
            if job.prompt_top is not None and result.probed_top_ids is not None:
                assert result.probed_top_logprobs is not None
                job.prompt_top[0][known] = result.probed_top_ids[at:end, : probe.top]
                job.prompt_top[1][known] = result.probed_top_logprobs[at:end, : probe.top]
        at = end
