"""silu_and_mul_quant, a composite: silu_and_mul, and quantize_rows of its result in the model's type."""

from __future__ import annotations

from collections.abc import Callable

import torch
from llmcore.api import OpContext
from llmcore.ops import SAMPLE_TOKENS, Op, Shape, draw, silu_and_mul, size

from llmcore_quantization.ops import ROUNDED, Rows, Samples, distance, in_forms, quantizer

TOLERANCE = ROUNDED

SHAPES = in_forms(44, 256)

compared = distance


def make(context: OpContext) -> Op:
    """x [T, 2 size], gate first -> (codes [T, size], scale [T, size / group] f32)."""
    return _joined(silu_and_mul.reference, quantizer(context))


def expand(context: OpContext, part: Callable[..., Op]) -> Op:
    """The chosen silu_and_mul, then quantize_rows."""
    return _joined(part("silu_and_mul", size=context.shape["size"]), quantizer(context, part))


def _joined(activation: Op, quantize: Callable[[torch.Tensor], Rows]) -> Op:
    def run(x: torch.Tensor) -> Rows:
        return quantize(activation(x))

    return run


def samples(context: OpContext) -> Samples:
    """Usual values, larger ones, and a token without any."""
    for tokens in SAMPLE_TOKENS[context.bucket]:
        x = draw(context, tokens, 2 * size(context.shape, "size"))
        yield (x,)
        x = x * 20
        x[1:2] = 0.0
        yield (x,)


def cost(shape: Shape) -> tuple[float, float]:
    """Two reads and a write of a byte per result."""
    elements = size(shape, "tokens") * size(shape, "size")
    return elements * (2.0 * size(shape, "element", 2) + 1), 9.0 * elements
