"""Variant `filtered`: top-k, top-p and min-p, in six launches."""

from __future__ import annotations

from llmcore.api import OpContext
from llmcore.layers.sampling import Sampled, Sampler, SampleRows
from torch import Tensor

from llmcore_triton.launch import overlaps
from llmcore_triton.sample.draw import draw
from llmcore_triton.sample.floors import floors
from llmcore_triton.sample.peaks import peaks


def make(context: OpContext) -> Sampler:
    """The kernels. Rows that do not filter draw the same tokens as in variant `temperature`."""
    pdl = overlaps(context)

    def sample(logits: Tensor, rows: SampleRows) -> Sampled:
        """logits [S, V] and their rows."""
        found = peaks(logits, pdl)
        tokens, finite = draw(logits, found, found.best, rows, floors(logits, found, rows, pdl), pdl)
        return Sampled(tokens=tokens, finite=finite)

    return sample
