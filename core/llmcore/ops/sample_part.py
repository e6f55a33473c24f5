"""sample.part: a draw from each row's part of the vocabulary, with the weight of the block that the token is from.

The part with the greatest weight has the token that `sample` draws from the whole row. Masses are relative to the best
score of the whole row, and random numbers belong to blocks and tokens of the whole vocabulary. See llmcore.ops.sample.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from llmcore.api.specs import OpContext
from llmcore.ops import SAMPLE_TOKENS, Shape, draw, draws_on, sample_best, size
from llmcore.ops.sample import SampleRows, heaviest, plain_rows

SHAPES = sample_best.SHAPES

TOLERANCE: Mapping[str, float] = {"f32": 1e-5, "f16": 1e-5, "bf16": 1e-5}
"""Applies to weights."""

compared = sample_best.compared


def reference(logits: torch.Tensor, first: int, best: torch.Tensor, rows: SampleRows) -> torch.Tensor:
    """-> [S, 2] f32: the weight of the heaviest block, its noisy log mass, and a token that is drawn from it.

    `logits` [S, N] of any float type: of the tokens from `first` on, a multiple of BLOCK. `best` [ranks, S, 2]: of all
    parts, what `sample.best` returns. `rows`: their filters are not read. Rows of temperature 0 and empty parts have a
    weight of minus infinity, and a token that is not read.
    """
    hot = rows.temperature > 0
    warm = torch.where(hot, rows.temperature, 1.0)[:, None]
    weight, token = heaviest(logits.float() / warm, best[..., 0].amax(0)[:, None] / warm, rows, first)
    return torch.stack((torch.where(hot, weight, -torch.inf), token.float()), -1)


def samples(context: OpContext) -> Iterator[tuple[torch.Tensor, int, torch.Tensor, SampleRows]]:
    """Rows at several temperatures, every third one at 0."""
    for tokens in SAMPLE_TOKENS[context.bucket]:
        logits = draw(context, tokens, size(context.shape, "vocab", 1000)) * 4
        best = torch.stack([sample_best.reference(*part) for part in sample_best.parts(logits)])
        rows = plain_rows(tokens, temperature=0.8, seed=-3).to(draws_on())
        rows.temperature[1::3], rows.temperature[2::3] = 0.0, 1.7
        rows.position.copy_(torch.arange(tokens))
        for part, first in sample_best.parts(logits):
            yield part, first, best, rows


def cost(shape: Shape) -> tuple[float, float]:
    """(bytes, flops): a rank reads its part once."""
    read, elements = sample_best.cost(shape)
    return read, 4.0 * elements
