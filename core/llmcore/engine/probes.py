"""Answers from a forward beside its samples: log-probabilities of prompts' own tokens, and hidden states."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from llmcore.engine.upload import Upload
from llmcore.sched.plan import StepPlan

_SLICE = 64
"""Positions whose logits exist at once; all of a chunk's would take more memory than its forward."""

_NORMED = 1024
"""Positions whose normed hidden states exist at once."""


class HasHead(Protocol):
    """The end of a model."""

    def logits(self, hidden: Tensor, residual: Tensor | None = None) -> Tensor:
        """[S, vocabulary]."""

    def normed(self, hidden: Tensor, residual: Tensor | None = None) -> Tensor:
        """[S, hidden size]."""


@dataclass(frozen=True)
class Asked:
    """The sizes of a step's probes: `targets` log-probabilities, `top` others beside each, `pools` hidden states."""

    targets: int
    top: int
    pools: int


@dataclass(frozen=True)
class Probed:
    """Answers, parallel to a plan's probes and pools: `logprobs` [L] f32, `ranks` [L] i32 from 1 on, the best `ids`
    and `best` [L, k], and `pooled` [P, hidden size] f32."""

    logprobs: Tensor | None = None
    ranks: Tensor | None = None
    ids: Tensor | None = None
    best: Tensor | None = None
    pooled: Tensor | None = None

    def to_host(self, copy: Callable[[Tensor], Tensor]) -> Probed:
        """The same on its way to the host."""
        columns = (self.logprobs, self.ranks, self.ids, self.best, self.pooled)
        return Probed(*(None if column is None else copy(column) for column in columns))

    def arrays(self) -> dict[str, Any]:
        """Members of a StepResult, once they have arrived."""
        named = {
            "probed": self.logprobs,
            "probed_ranks": self.ranks,
            "probed_top_ids": self.ids,
            "probed_top_logprobs": self.best,
            "pooled": self.pooled,
        }
        return {name: column.numpy() for name, column in named.items() if column is not None}


def put_probed(plan: StepPlan, upload: Upload) -> Asked:
    """Host: the positions of the plan's probes and pools, and what they ask for."""
    ends = np.cumsum(plan.n_query, dtype=np.int32)
    borders = ends - plan.n_query
    places = [borders[probe.row] + np.arange(probe.targets.size, dtype=np.int32) for probe in plan.probes]
    pooled = [np.arange(borders[pool.row] + pool.first, ends[pool.row], dtype=np.int32) for pool in plan.pools]
    upload.put("probed", np.concatenate((*places, *pooled)).astype(np.int32))
    if plan.probes:
        upload.put("targets", np.concatenate([probe.targets for probe in plan.probes]))
    if pooled:
        of = np.repeat(np.arange(len(pooled), dtype=np.int32), [part.size for part in pooled])
        upload.put("pool_of", of)
    top = max((probe.top for probe in plan.probes), default=0)
    return Asked(sum(part.size for part in places), top, len(pooled))


def answered(model: HasHead, hidden: Tensor, residual: Tensor | None, asked: Asked, upload: Upload) -> Probed:
    """Device: the answers from `hidden`, `residual` [L, size] of the positions that `put_probed` put."""
    found, n = Probed(), asked.targets
    if n:
        before = None if residual is None else residual[:n]
        found = target_logprobs(model, hidden[:n], before, upload.get("targets"), asked.top)
    if not asked.pools:
        return found
    beyond = None if residual is None else residual[n:]
    pooled = pool(model, hidden[n:], beyond, upload.get("pool_of"), asked.pools)
    return replace(found, pooled=pooled)


def target_logprobs(model: HasHead, hidden: Tensor, residual: Tensor | None, targets: Tensor, top: int = 0) -> Probed:
    """Device: natural logs and ranks of the tokens `targets` [L] after positions with `hidden`, `residual` [L, size],
    and natural logs of the `top` best in their places. A rank says how many tokens are likelier, and one more."""
    parts, ranks, ids, best = [], [], [], []
    for start in range(0, len(hidden), _SLICE):
        some = slice(start, start + _SLICE)
        logits = model.logits(hidden[some], None if residual is None else residual[some]).float()
        norm = torch.logsumexp(logits, -1, keepdim=True)
        mine = logits.gather(1, targets[some, None].long())
        parts.append((mine - norm)[:, 0])
        ranks.append((logits > mine).sum(-1, dtype=torch.int32) + 1)
        if top:
            highest, where = logits.topk(top, dim=-1)
            ids.append(where.int())
            best.append(highest - norm)
    found = Probed(torch.cat(parts), torch.cat(ranks))
    return replace(found, ids=torch.cat(ids), best=torch.cat(best)) if top else found


def pool(model: HasHead, hidden: Tensor, residual: Tensor | None, of: Tensor, count: int) -> Tensor:
    """Device: [count, size] f32, the sums of the normed states of positions with equal `of` [L]."""
    sums = torch.zeros((count, hidden.shape[1]), dtype=torch.float32, device=hidden.device)
    for start in range(0, len(hidden), _NORMED):
        some = slice(start, start + _NORMED)
        normed = model.normed(hidden[some], None if residual is None else residual[some])
        sums.index_add_(0, of[some].long(), normed.float())
    return sums
