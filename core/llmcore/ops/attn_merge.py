"""attn.merge: join attention over parts of the keys into attention over all of them."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from llmcore.api.specs import OpContext
from llmcore.ops import ROUNDING, SAMPLE_TOKENS, Shape, draw, size

TOLERANCE = ROUNDING


def reference(parts: torch.Tensor, lses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """parts [P, T, heads, size], lses [P, T, heads] f32 (natural logarithm) -> ([T, heads, size], [T, heads]).

    A part that saw no key has an lse of -inf. Its values are not used and may be NaN.
    """
    lse = lses.logsumexp(0)
    weights = (lses - lse).exp().nan_to_num(0.0).unsqueeze(-1)
    merged = torch.where(weights > 0, parts.float() * weights, 0.0).sum(0)
    return merged.to(parts.dtype), lse


def samples(context: OpContext) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Two and five parts, one of them empty and full of NaN."""
    heads, width = size(context.shape, "heads", 3), size(context.shape, "value_size", 16)
    for tokens in SAMPLE_TOKENS[context.bucket]:
        for count in (2, 5):
            parts = draw(context, count, tokens, heads, width)
            lses = draw(context, count, tokens, heads, seed=1).float() * 10
            yield parts, lses
            lses[1, ::2] = -torch.inf
            parts[1, ::2] = torch.nan
            yield parts, lses


def cost(shape: Shape) -> tuple[float, float]:
    """Each part is read once."""
    elements = size(shape, "parts", 2) * size(shape, "tokens") * size(shape, "heads") * size(shape, "value_size")
    return float(elements * size(shape, "element", 2)), 3.0 * elements
