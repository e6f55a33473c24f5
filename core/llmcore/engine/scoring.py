"""Where a model scores: its head's numbers of each row's last token go to the host, and nothing is drawn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from llmcore.engine.sampling import Draw, RowSampler
from llmcore.engine.tables import Upload
from llmcore.ops.sample import Sampled
from llmcore.sched.plan import StepPlan


@dataclass(frozen=True, kw_only=True)
class Scored(Sampled):
    """`scores` [S, n] f32; every token is 0 and ends its request."""

    scores: Tensor


class RowScorer(RowSampler):
    """In place of a RowSampler."""

    def admit(self, plan: StepPlan) -> None:
        """Nothing to note."""

    def pack(self, plan: StepPlan, upload: Upload, rows: int, ready: Sequence[Any] = ()) -> Draw:
        """Every step is alike."""
        return Draw(0)

    def draw(self, logits: Tensor, request: Tensor, draw: Draw, upload: Upload) -> Scored:
        """logits [S, n] as they are."""
        scores = logits.float()
        tokens = torch.zeros(len(scores), dtype=torch.int32, device=scores.device)
        return Scored(tokens=tokens, finite=scores.isfinite().all(1), scores=scores)
