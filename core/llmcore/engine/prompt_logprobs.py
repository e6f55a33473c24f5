"""Log-probabilities of prompts' own tokens: what a forward knows beside the rows that it samples."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from llmcore.engine.tables import Upload
from llmcore.sched.plan import StepPlan

_SLICE = 64
"""Positions whose logits exist at once; all of a chunk's would take more memory than its forward."""


class HasLogits(Protocol):
    """The head of a model."""

    def logits(self, hidden: Tensor, residual: Tensor | None = None) -> Tensor:
        """[S, vocabulary]."""


def put_probed(plan: StepPlan, upload: Upload) -> None:
    """Host: the step's positions whose next token is known, and these tokens."""
    borders = np.cumsum(plan.n_query, dtype=np.int32) - plan.n_query
    places = [borders[probe.row] + np.arange(probe.targets.size, dtype=np.int32) for probe in plan.probes]
    upload.put("probed", np.concatenate(places).astype(np.int32))
    upload.put("targets", np.concatenate([probe.targets for probe in plan.probes]))


def target_logprobs(model: HasLogits, hidden: Tensor, residual: Tensor | None, targets: Tensor) -> Tensor:
    """Device: [L] f32 natural logs of the tokens `targets` [L] after positions with `hidden`, `residual` [L, size]."""
    parts = []
    for start in range(0, len(hidden), _SLICE):
        some = slice(start, start + _SLICE)
        logits = model.logits(hidden[some], None if residual is None else residual[some]).float()
        chosen = logits.gather(1, targets[some, None].long())
        parts.append((chosen - torch.logsumexp(logits, -1, keepdim=True))[:, 0])
    return torch.cat(parts)
