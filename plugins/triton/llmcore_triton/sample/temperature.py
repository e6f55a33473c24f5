"""Variant `temperature`: draws from the whole vocabulary, in three launches."""

from __future__ import annotations

from llmcore.api import OpContext
from llmcore.layers.sampling import Sampled, Sampler, SampleRows
from torch import Tensor

from llmcore_triton.launch import overlaps
from llmcore_triton.sample.draw import draw
from llmcore_triton.sample.peaks import peaks


def make(context: OpContext) -> Sampler:
    """The kernels. Rows of temperature 0 take the best token."""
    pdl = overlaps(context)

    def sample(logits: Tensor, rows: SampleRows) -> Sampled:
        """logits [S, V] and their rows, whose filters are not read."""
        found = peaks(logits, pdl)
        tokens, finite = draw(logits, found, found.best, rows, None, pdl)
        return Sampled(tokens=tokens, finite=finite)

    return sample
