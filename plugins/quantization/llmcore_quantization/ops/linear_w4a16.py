"""linear.w4a16, a composite: x W^T + b, where W has codes of 4 bits, and a scale and perhaps a zero for each group."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from llmcore.api import OpContext
from llmcore.ops import SAMPLE_TOKENS, Op, Shape, draw

from llmcore_quantization.canonical import Scheme, dequantized
from llmcore_quantization.ops import Samples, bias, long, moved, plain, scheme_of, shape_of, sizes, weight

TOLERANCE = {"f32": 2e-5, "f16": 5e-3, "bf16": 2e-2}
"""The tolerance of `linear`: the weight is rounded to the type of x before it is multiplied."""

SHAPES: tuple[Shape, ...] = (
    shape_of(Scheme(codes="u4", group=32, zeros=True), 96, 51, bias=True),
    shape_of(Scheme(codes="u4", group=128, scale="bf16"), 128, 64, bias=False),
    shape_of(Scheme(codes="u4", group=64, zeros=True, ordered=True), 128, 40, bias=False),
    shape_of(Scheme(codes="u4", scale="f32"), 72, 33, bias=True),
)
"""Zeros, and groups in another order (GPTQ's desc_act); sizes that no tile divides, and a scale per row."""


def reference(
    x: torch.Tensor,
    codes: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor | None = None,
    order: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """x [T, inputs], codes, scale, zero and order in the canonical form, bias [outputs] or None -> [T, outputs]."""
    return F.linear(x, dequantized(codes, scale, zero, order, dtype=x.dtype), bias)


def expand(context: OpContext, part: Callable[..., Op]) -> Op:
    """The chosen `linear` with the dequantized weight."""
    linear = plain(context, part)

    def run(
        x: torch.Tensor,
        codes: torch.Tensor,
        scale: torch.Tensor,
        zero: torch.Tensor | None = None,
        order: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        y: torch.Tensor = linear(x, dequantized(codes, scale, zero, order, dtype=x.dtype), bias)
        return y

    return run


def samples(context: OpContext) -> Samples:
    """Sizes that no tile divides, and an output without weights."""
    scheme, inputs = scheme_of(context.shape), sizes(context)[0]
    held = weight(context, scheme)
    for tokens in SAMPLE_TOKENS[context.bucket]:
        x = draw(context, tokens, inputs)
        yield x, held["codes"], held["scale"], held.get("zero"), held.get("order"), bias(context)


def long_samples(context: OpContext) -> Samples:
    """A token count near the upper end of the bucket."""
    held = weight(context, scheme_of(context.shape))
    yield long(context), held["codes"], held["scale"], held.get("zero"), held.get("order"), bias(context)


def cost(shape: Shape) -> tuple[float, float]:
    """(bytes, flops), with codes as they are packed."""
    return moved(shape, scheme_of(shape))
