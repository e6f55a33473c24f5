"""moe.combine: the weighted sum of the results of each token's experts, plus an optional extra."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from llmcore.api.specs import OpContext
from llmcore.ops import ROUNDING, SAMPLE_TOKENS, Shape, draw, size

TOLERANCE = ROUNDING

SHAPES: tuple[Shape, ...] = ({"top_k": 2, "size": 72}, {"top_k": 1, "size": 40}, {"top_k": 8, "size": 128})


def reference(y: torch.Tensor, weights: torch.Tensor, extra: torch.Tensor | None = None) -> torch.Tensor:
    """y [T top_k, size] by pair, weights [T, top_k] f32, extra [T, size] or None -> [T, size]; summed in f32."""
    tokens, top_k = weights.shape
    combined = (y.view(tokens, top_k, -1).float() * weights.unsqueeze(-1)).sum(1)
    if extra is not None:
        combined = combined + extra.float()
    return combined.to(y.dtype)


def samples(context: OpContext) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]]:
    """With an extra and without."""
    top_k, width = size(context.shape, "top_k", 2), size(context.shape, "size", 72)
    for tokens in SAMPLE_TOKENS[context.bucket]:
        y, weights = draw(context, tokens * top_k, width), draw(context, tokens, top_k, seed=1).float().softmax(-1)
        yield y, weights, None
        yield y, weights, draw(context, tokens, width, seed=2)


def cost(shape: Shape) -> tuple[float, float]:
    """(bytes, flops): each pair and the extra are read once, each token is written once."""
    tokens, top_k, width = (size(shape, name) for name in ("tokens", "top_k", "size"))
    return float(tokens * width * (top_k + 2) * size(shape, "element", 2)), 2.0 * tokens * top_k * width
