"""moe.combine: the weighted sum of each token's experts, and what else is added to it."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from llmcore.ops import ROUNDING, SAMPLE_TOKENS, Op, Shape, draw, size
from llmcore.specs import OpContext

TOLERANCE = ROUNDING

SHAPES: tuple[Shape, ...] = ({"top_k": 2, "size": 72}, {"top_k": 1, "size": 40}, {"top_k": 8, "size": 128})


def reference(y: torch.Tensor, weights: torch.Tensor, extra: torch.Tensor | None = None) -> torch.Tensor:
    """y [T top_k, size] of the pairs, weights [T, top_k] f32, extra [T, size] or None -> [T, size]; added in f32."""
    tokens, top_k = weights.shape
    combined = (y.view(tokens, top_k, -1).float() * weights.unsqueeze(-1)).sum(1)
    if extra is not None:
        combined = combined + extra.float()
    return combined.to(y.dtype)


def make(context: OpContext) -> Op:
    """The reference."""
    return reference


def samples(context: OpContext) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]]:
    """With something to add and without."""
    top_k, width = size(context.shape, "top_k", 2), size(context.shape, "size", 72)
    for tokens in SAMPLE_TOKENS[context.bucket]:
        y, weights = draw(context, tokens * top_k, width), draw(context, tokens, top_k, seed=1).float().softmax(-1)
        yield y, weights, None
        yield y, weights, draw(context, tokens, width, seed=2)


def cost(shape: Shape) -> tuple[float, float]:
    """Each pair is read once, each token written; what is added is read."""
    tokens, top_k, width = (size(shape, name) for name in ("tokens", "top_k", "size"))
    return float(tokens * width * (top_k + 2) * size(shape, "element", 2)), 2.0 * tokens * top_k * width
