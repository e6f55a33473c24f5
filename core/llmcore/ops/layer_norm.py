"""layer_norm: (x - mean(x)) / sqrt(variance(x) + eps) * weight + bias, over the last dimension (arXiv:1607.06450)."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from llmcore.api.specs import OpContext
from llmcore.ops import ROUNDING, SAMPLE_TOKENS, Shape, draw, size

TOLERANCE = ROUNDING

SHAPES: tuple[Shape, ...] = (
    {"size": 40, "bias": False},
    {"size": 128, "bias": True},
    {"size": 16, "heads": 3, "bias": False},
)


def reference(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float) -> torch.Tensor:
    """x [..., size] -> [..., size]; mean and variance are computed in f32.

    `weight`, `bias`: [size], or [heads, size] for x [T, heads, size] if every head has its own.
    """
    if weight.dim() == 1:
        return F.layer_norm(x, weight.shape, weight, bias, eps)
    y = F.layer_norm(x.float(), x.shape[-1:], None, None, eps) * weight
    return (y if bias is None else y + bias).to(x.dtype)


def samples(context: OpContext) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, float]]:
    """Usual rows, rows with zero variance (only eps counts), rows whose squares overflow f16, rows far from zero."""
    heads = (size(context.shape, "heads"),) if context.shape.get("heads") else ()
    width = size(context.shape, "size", 40)
    weight = draw(context, *heads, width, seed=1)
    bias = draw(context, *heads, width, seed=2) if context.shape.get("bias") else None
    for tokens in SAMPLE_TOKENS[context.bucket]:
        x = draw(context, tokens, *heads, width)
        yield x, weight, bias, 1e-5
        yield torch.full_like(x, 3.0), weight, bias, 1e-6
        yield x * 300, weight, bias, 1e-5
        yield x + 40, weight, bias, 1e-5


def cost(shape: Shape) -> tuple[float, float]:
    """One read, one write and seven operations per element."""
    elements = size(shape, "tokens") * size(shape, "heads") * size(shape, "size")
    return 2.0 * elements * size(shape, "element", 2), 7.0 * elements
