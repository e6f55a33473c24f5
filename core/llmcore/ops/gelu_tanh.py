"""gelu_tanh: x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))), GELU's tanh form (arXiv:1606.08415)."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from llmcore.api.specs import OpContext
from llmcore.ops import ROUNDING, SAMPLE_TOKENS, Shape, draw, size

TOLERANCE = ROUNDING

SHAPES: tuple[Shape, ...] = ({"size": 44}, {"size": 128})


def reference(x: torch.Tensor) -> torch.Tensor:
    """x [T, size] -> [T, size], rounded once."""
    return F.gelu(x, approximate="tanh")


def samples(context: OpContext) -> Iterator[tuple[torch.Tensor]]:
    """Usual values, and large values of both signs whose cubes overflow f16."""
    width = size(context.shape, "size", 44)
    for tokens in SAMPLE_TOKENS[context.bucket]:
        x = draw(context, tokens, width)
        yield (x,)
        yield (x * 100,)


def cost(shape: Shape) -> tuple[float, float]:
    """One read, one write and about ten operations per element."""
    elements = size(shape, "tokens") * size(shape, "size")
    return 2.0 * elements * size(shape, "element", 2), 10.0 * elements
