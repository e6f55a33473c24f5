"""Token masks of logits processors on the host: rows that wait for them between their forward and their draw."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from llmcore.api.errors import reraise_if_stopping
from llmcore.api.protocols import Event
from llmcore.engine.upload import Tables, Upload, padded_to
from llmcore.sched.plan import Frame, StepPlan
from llmcore.sched.processors import Steered

_POLL = 0.0001
_PATIENCE = 0.01
"""Seconds to wait for masks when every row of the step needs one, so that going on without them serves no row."""


@dataclass
class Outcome:
    """The late samples of a step, sorted by what their logits processors have said."""

    ready: list[Steered] = field(default_factory=list)
    """Those that are drawn now."""
    late: list[int] = field(default_factory=list)
    """Request indices that get no token in this step."""
    errors: dict[int, tuple[str, str]] = field(default_factory=dict)
    """Request index -> (code, message) of requests that must end."""


def settle(plan: StepPlan, bound: Sequence[Steered], forward: Event) -> Outcome:
    """Wait for what the processors say, at most until the `forward` has ended: others must not wait for them."""
    end = time.perf_counter() + _PATIENCE
    while waiting := [b for _, b in bound if not b.ready and not b.dropped]:
        # If every row waits, going on serves no row.
        if forward.done() and (len(waiting) < plan.sample_request.size or time.perf_counter() > end):
            break
        waiting[0].wait(_POLL)
    outcome = Outcome()
    for s, b in bound:
        request = int(plan.sample_request[s])
        if b.dropped:
            continue
        if not b.ready:
            b.late += 1
            outcome.late.append(request)
        elif b.error is not None:
            outcome.errors[request] = b.error
        else:
            outcome.ready.append((s, b))
    return outcome


def put_outputs(plan: StepPlan, sizes: Frame, late: Sequence[int], scratch: int, upload: Upload) -> None:
    """The columns by which the tables move on: they stay where they are for the requests that are `late`. `sizes`:
    those that the step is padded to; `scratch`: the request that stands for padding."""
    n_query = np.where(np.isin(plan.request, late), 0, plan.n_query)
    sample = np.where(np.isin(plan.sample_request, late), scratch, plan.sample_request)
    upload.put("n_query", padded_to(sizes.rows, n_query))
    upload.put("sample_request", padded_to(sizes.samples, sample, scratch))


def changed(logits: Tensor, tables: Tables, plan: StepPlan, outcome: Outcome) -> tuple[Tensor, Tensor]:
    """(scores [S, V] f32 after the device processors, which rows [S] are fine). Failed processors go to `outcome`."""
    scores = logits.float() if logits.dtype != torch.float32 else logits.clone()
    fine = torch.isfinite(scores).all(-1)
    for s, bound in outcome.ready:
        request = int(plan.sample_request[s])
        for name, processor in bound.devices:
            try:
                row = processor(scores[s].clone(), tables.history[request], tables.lengths[request])
                if row.shape != scores[s].shape:
                    raise ValueError(f"it returned {list(row.shape)} for {list(scores[s].shape)} scores")
                fine[s] &= (row < torch.inf).all() & (row > -torch.inf).any()
                # the op takes minus infinity for a broken row
                scores[s] = row.float().clamp(min=torch.finfo(torch.float32).min)
            except BaseException as error:  # noqa: BLE001 - whatever it raises ends its request only
                reraise_if_stopping(error)
                outcome.errors[request] = bound.fail(name, error)
                break
    return scores, fine
