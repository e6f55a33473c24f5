"""rms_norm: x / sqrt(mean(x^2) + eps) * weight, over the last dimension."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from llmcore.api.specs import OpContext
from llmcore.ops import ROUNDING, SAMPLE_TOKENS, Shape, draw, size

TOLERANCE = ROUNDING

SHAPES: tuple[Shape, ...] = ({"size": 40}, {"size": 128})


def reference(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [..., size], weight [size] -> [..., size]. The mean is computed in f32. weight has the type of x, or f32."""
    if weight.dtype == x.dtype:
        return F.rms_norm(x, weight.shape, weight, eps)
    return F.rms_norm(x.float(), weight.shape, weight, eps).to(x.dtype)


def samples(context: OpContext) -> Iterator[tuple[torch.Tensor, torch.Tensor, float]]:
    """Usual rows, rows of zeros (only eps counts), rows whose squares overflow f16; also weights in f32."""
    width = size(context.shape, "size", 40)
    weight = draw(context, width, seed=1)
    for tokens in SAMPLE_TOKENS[context.bucket]:
        x = draw(context, tokens, width)
        yield x, weight, 1e-5
        yield x, weight.float() * 1.001, 1e-5
        yield torch.zeros_like(x), weight, 1e-6
        yield x * 300, weight, 1e-5


def cost(shape: Shape) -> tuple[float, float]:
    """One read, one write and four operations per element."""
    elements = size(shape, "tokens") * size(shape, "size")
    return 2.0 * elements * size(shape, "element", 2), 4.0 * elements
