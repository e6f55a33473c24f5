"""Answers from a forward beside its samples: log-probabilities of prompts' own tokens, and hidden states."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import torch
from torch import Tensor

from llmcore.engine.model import Model
from llmcore.engine.upload import Upload
from llmcore.sched.plan import StepPlan

_SLICE = 64
"""Positions whose logits exist at once; all of a chunk's would take more memory than its forward."""

_NORMED = 1024
"""Positions whose normed hidden states exist at once."""


States = tuple[Tensor, Tensor | None]
"""(hidden, residual) of positions, as a model returns them."""


def part(states: States, where: slice) -> States:
    """Those of some positions."""
    hidden, residual = states
    return hidden[where], None if residual is None else residual[where]


def put_probed(plan: StepPlan, upload: Upload) -> None:
    """Host: the positions of the plan's probes and pools, and what they ask for."""
    ends = np.cumsum(plan.n_query, dtype=np.int32)
    borders = ends - plan.n_query
    places = [borders[probe.row] + np.arange(probe.targets.size, dtype=np.int32) for probe in plan.probes]
    pooled = [np.arange(borders[pool.row] + pool.first, ends[pool.row], dtype=np.int32) for pool in plan.pools]
    upload.put("probed", np.concatenate((*places, *pooled)).astype(np.int32))
    if plan.probes:
        upload.put("targets", np.concatenate([probe.targets for probe in plan.probes]))
    if pooled:
        of = np.repeat(np.arange(len(pooled), dtype=np.int32), [some.size for some in pooled])
        upload.put("pool_of", of)


def answered(model: Model, states: States, plan: StepPlan, upload: Upload) -> dict[str, Tensor]:
    """Device: the answers from the states of the positions that `put_probed` put, as columns of a StepResult."""
    targets = sum(probe.targets.size for probe in plan.probes)
    found = {}
    if targets:
        top = max(probe.top for probe in plan.probes)
        found = _logprobs(model, part(states, slice(targets)), upload.get("targets"), top)
    if plan.pools:
        found["pooled"] = _pooled(model, part(states, slice(targets, None)), upload.get("pool_of"), len(plan.pools))
    return found


def _logprobs(model: Model, states: States, targets: Tensor, top: int) -> dict[str, Tensor]:
    """Natural logs and ranks of the tokens `targets` [L] after positions with `states`, and natural logs of the `top`
    best in their places. A rank says how many tokens are likelier, and one more."""
    columns: dict[str, list[Tensor]] = defaultdict(list)
    for start in range(0, len(targets), _SLICE):
        some = slice(start, start + _SLICE)
        logits = model.logits(*part(states, some)).float()
        norm = torch.logsumexp(logits, -1, keepdim=True)
        mine = logits.gather(1, targets[some, None].long())
        columns["probed"].append((mine - norm)[:, 0])
        columns["probed_ranks"].append((logits > mine).sum(-1, dtype=torch.int32) + 1)
        if top:
            highest, where = logits.topk(top, dim=-1)
            columns["probed_top_ids"].append(where.int())
            columns["probed_top_logprobs"].append(highest - norm)
    return {name: torch.cat(parts) for name, parts in columns.items()}


def _pooled(model: Model, states: States, of: Tensor, count: int) -> Tensor:
    """[count, size] f32, the sums of the normed states of positions with equal `of` [L]."""
    hidden, _ = states
    sums = torch.zeros((count, hidden.shape[1]), dtype=torch.float32, device=hidden.device)
    for start in range(0, len(hidden), _NORMED):
        some = slice(start, start + _NORMED)
        sums.index_add_(0, of[some].long(), model.normed(*part(states, some)).float())
    return sums
