"""linear.w8a8, a composite: x W^T + b, where W and x have codes of 8 bits with a scale per row.

Op `quantize_rows` makes the codes of x. A kernel multiplies the codes and applies both scales to the sum.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F
from llmcore.api import OpContext
from llmcore.ops import DTYPES, SAMPLE_TOKENS, Op, Shape, draw

from llmcore_quantization.canonical import BLOCK, Scheme, dequantized
from llmcore_quantization.ops import Samples, bias, coded, long, moved, plain, scheme_of, shape_of, sizes, weight
from llmcore_quantization.rounding import restored

TOLERANCE = {"f32": 3e-3, "f16": 6e-3, "bf16": 2e-2}
"""Tensor cores add up products of float8 with fewer bits than f32 has."""

SHAPES: tuple[Shape, ...] = (
    shape_of(Scheme(codes="i8", scale="f32"), 72, 51, bias=True),
    shape_of(Scheme(codes="i8", scale="f32"), 128, 64, bias=False),
    shape_of(Scheme(codes="e4m3", scale="f32"), 128, 64, bias=False),
    shape_of(Scheme(codes="e4m3", scale="f32"), 72, 51, bias=True),
)


def make(context: OpContext) -> Op:
    """x [T, inputs] and x_scale [T, 1] f32, codes [outputs, inputs] and scale [outputs, 1], bias [outputs] or None
    -> [T, outputs] in the model's type.

    The product of the dequantized inputs and the dequantized weight in f32, rounded once.
    """
    dtype = DTYPES[context.dtype]

    def run(
        x: torch.Tensor,
        x_scale: torch.Tensor,
        codes: torch.Tensor,
        scale: torch.Tensor,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        y = F.linear(restored(x, x_scale), dequantized(codes, scale))
        return (y if bias is None else y + bias.float()).to(dtype)

    return run


def expand(context: OpContext, part: Callable[..., Op]) -> Op:
    """The chosen `linear` with the dequantized inputs and the dequantized weight, both in the model's type."""
    linear, dtype = plain(context, part), DTYPES[context.dtype]

    def run(
        x: torch.Tensor,
        x_scale: torch.Tensor,
        codes: torch.Tensor,
        scale: torch.Tensor,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        y: torch.Tensor = linear(restored(x, x_scale).to(dtype), dequantized(codes, scale, dtype=dtype), bias)
        return y

    return run


def samples(context: OpContext) -> Samples:
    """Tokens that had an outlier and no input at all, and an output without weights."""
    held = _weight(context)
    for tokens in SAMPLE_TOKENS[context.bucket]:
        x = draw(context, tokens, sizes(context)[0])
        yield *coded(context, x), held["codes"], held["scale"], bias(context)


def long_samples(context: OpContext) -> Samples:
    """A token count near the upper end of the bucket."""
    held = _weight(context)
    yield *coded(context, long(context)), held["codes"], held["scale"], bias(context)


def cost(shape: Shape) -> tuple[float, float]:
    """(bytes, flops), with inputs as codes and scales."""
    return moved(shape, replace(scheme_of(shape), inputs="row"))


def _weight(context: OpContext) -> dict[str, torch.Tensor]:
    return weight(context, scheme_of(context.shape), BLOCK if context.shape["group"] else 1)
