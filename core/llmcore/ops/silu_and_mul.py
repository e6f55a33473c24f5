"""silu_and_mul: silu(gate) * up, for the two halves of one tensor."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from llmcore.api.specs import OpContext
from llmcore.ops import ROUNDING, SAMPLE_TOKENS, Op, Shape, draw, size

TOLERANCE = ROUNDING

SHAPES: tuple[Shape, ...] = ({"size": 44}, {"size": 128})


def reference(x: torch.Tensor) -> torch.Tensor:
    """x [T, 2 size], gate first -> [T, size]; rounded once."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate.float()).mul_(up).to(x.dtype)


def rounded_twice(x: torch.Tensor) -> torch.Tensor:
    """The same, but rounded after silu too, in the type of x.

    It needs fewer calls, which matters for one token. For many tokens, f32 intermediates would not fit the CPU cache.
    """
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def make(context: OpContext) -> Op:
    """The reference for 2 to 64 tokens, where it costs nothing, and if all token counts must round alike."""
    return reference if context.deterministic or context.bucket in (1, 2) else rounded_twice


def samples(context: OpContext) -> Iterator[tuple[torch.Tensor]]:
    """Usual values, and large values of both signs for which exp overflows."""
    width = 2 * size(context.shape, "size", 44)
    for tokens in SAMPLE_TOKENS[context.bucket]:
        x = draw(context, tokens, width)
        yield (x,)
        yield (x * 100,)


def cost(shape: Shape) -> tuple[float, float]:
    """Two reads and a write per output."""
    elements = size(shape, "tokens") * size(shape, "size")
    return 3.0 * elements * size(shape, "element", 2), 5.0 * elements
