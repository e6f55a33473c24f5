"""rope: rotary positions on query and key heads. Elements i and i + rotated / 2 are a pair, as in Hugging Face."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from llmcore.api.specs import OpContext
from llmcore.ops import ROUNDING, SAMPLE_TOKENS, Shape, draw, size

TOLERANCE = ROUNDING

SHAPES: tuple[Shape, ...] = ({"heads": 5, "size": 16, "rotated": 16}, {"heads": 3, "size": 16, "rotated": 8})


def reference(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x [T, heads, size], cos and sin [T, rotated] f32 -> [T, heads, size].

    Only the first `rotated` elements of a head are rotated. `cos` and `sin` hold each angle twice, once per half. The
    first half of `sin` is negated, so that the result is x * cos + swapped(x) * sin.
    """
    rotated = cos.shape[-1]
    turning = x[..., :rotated].float()
    turned = turning * cos.unsqueeze(1) + turning.roll(rotated // 2, -1) * sin.unsqueeze(1)
    if rotated == x.shape[-1]:
        return turned.to(x.dtype)
    return torch.cat((turned.to(x.dtype), x[..., rotated:]), -1)


def samples(context: OpContext) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Rotation of whole heads and of half of each head, also at far positions."""
    heads, width = size(context.shape, "heads", 5), size(context.shape, "size", 16)
    for tokens in SAMPLE_TOKENS[context.bucket]:
        for rotated in {size(context.shape, "rotated", width), size(context.shape, "rotated", width // 4 * 2)}:
            angles = torch.arange(tokens)[:, None] * 977 / 100.0 ** torch.linspace(0, 1, rotated // 2)
            cos, sin = angles.cos(), angles.sin()
            yield draw(context, tokens, heads, width), torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)


def cost(shape: Shape) -> tuple[float, float]:
    """One read, one write and three operations per element."""
    elements = size(shape, "tokens") * size(shape, "heads") * size(shape, "size")
    return 2.0 * elements * size(shape, "element", 2), 3.0 * elements
