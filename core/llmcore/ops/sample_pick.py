"""sample.pick: the next token of each row, from what all parts of the vocabulary have exchanged.

Every rank gets the same numbers, so every rank picks the same tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from llmcore.api.specs import OpContext
from llmcore.ops import SAMPLE_TOKENS, Shape, draws_on, size

SHAPES: tuple[Shape, ...] = ({"vocab": 1000, "ranks": 2}, {"vocab": 1000, "ranks": 3})

TOLERANCE: Mapping[str, float] = {"f32": 0.0, "f16": 0.0, "bf16": 0.0}


def reference(best: torch.Tensor, drawn: torch.Tensor, temperature: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """-> tokens [S] int32 and finite [S] bool, False if a row's logits contain NaN or infinity.

    `best` and `drawn` [ranks, S, 2] f32, in rank order: of all parts, what `sample.best` and `sample.part` return.
    `drawn` is read for rows of a `temperature` [S] above 0. Of equal parts the first one wins.
    """
    columns = torch.where(temperature[:, None] > 0, drawn, best)
    winner = columns[..., 0].argmax(0, keepdim=True)
    return columns[..., 1].gather(0, winner)[0].int(), torch.isfinite(best[..., 0].amax(0))


def samples(context: OpContext) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Equal parts, parts that are not finite, and NaN where nothing is drawn."""
    ranks, vocabulary = size(context.shape, "ranks", 2), size(context.shape, "vocab", 1000)
    generator = torch.Generator().manual_seed(0)
    for tokens in SAMPLE_TOKENS[context.bucket]:
        scores = torch.randn(2, ranks, tokens, generator=generator).round()
        chosen = torch.randint(0, vocabulary, (2, ranks, tokens), generator=generator).sort(1).values
        best, drawn = torch.stack((scores, chosen.float()), -1).unbind(0)
        temperature = torch.arange(tokens) % 2 * 0.7
        drawn[:, ::2] = torch.nan
        best[0, ::5, 0], best[ranks - 1, 1::5, 0], best[:, 2::5, 0] = torch.inf, torch.inf, -torch.inf
        drawn[ranks - 1, :, 0] = -torch.inf
        yield best.to(draws_on()), drawn.to(draws_on()), temperature.to(draws_on())


def cost(shape: Shape) -> tuple[float, float]:
    """(bytes, flops): two numbers of each part are read."""
    elements = 2.0 * size(shape, "tokens") * size(shape, "ranks", 2)
    return 4.0 * elements, elements
