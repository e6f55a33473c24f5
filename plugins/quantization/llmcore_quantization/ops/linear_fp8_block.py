"""linear.fp8_block, a composite: x W^T + b, where W is float8 e4m3 with a scale per group, and x is rounded alike.

A group is 128 inputs in published checkpoints. Their scales are for blocks of 128 outputs; here each output repeats
its block's. The largest magnitude of a token in a group becomes 448. A kernel multiplies the codes of a group and
applies both scales to the sum.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from llmcore.api import OpContext
from llmcore.ops import SAMPLE_TOKENS, Op, Shape, draw

from llmcore_quantization.canonical import Scheme, dequantized
from llmcore_quantization.ops import Samples, bias, long, moved, plain, scheme_of, shape_of, sizes, uneven, weight
from llmcore_quantization.rounding import rounded

TOLERANCE = {"f32": 3e-3, "f16": 6e-3, "bf16": 2e-2}
"""The tolerance of linear.w8a8, for the same reason."""

SHAPES: tuple[Shape, ...] = (
    shape_of(Scheme(codes="e4m3", group=128, scale="f32", inputs="group"), 256, 51, bias=True),
    shape_of(Scheme(codes="e4m3", group=128, scale="f32", inputs="group"), 128, 160, bias=False),
)

BLOCK = 128
"""Outputs that share a scale in the samples."""


def reference(
    x: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """x [T, inputs], codes [outputs, inputs], scale [outputs, inputs / group], bias or None -> [T, outputs].

    The product of the rounded inputs and the dequantized weight in f32, rounded once to the type of x.
    """
    y = F.linear(rounded(x, codes.dtype, _group(codes, scale)), dequantized(codes, scale))
    return (y if bias is None else y + bias.float()).to(x.dtype)


def expand(context: OpContext, part: Callable[..., Op]) -> Op:
    """The chosen `linear` with the rounded inputs and the dequantized weight, both in the type of x."""
    linear = plain(context, part)

    def run(
        x: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        seen = rounded(x, codes.dtype, _group(codes, scale)).to(x.dtype)
        y: torch.Tensor = linear(seen, dequantized(codes, scale, dtype=x.dtype), bias)
        return y

    return run


def _group(codes: torch.Tensor, scale: torch.Tensor) -> int:
    """The inputs that share a scale."""
    return codes.shape[1] // scale.shape[1]


def samples(context: OpContext) -> Samples:
    """Tokens with an outlier in one group and without any input."""
    held, inputs = weight(context, scheme_of(context.shape), BLOCK), sizes(context)[0]
    for tokens in SAMPLE_TOKENS[context.bucket]:
        yield uneven(draw(context, tokens, inputs)), held["codes"], held["scale"], bias(context)


def long_samples(context: OpContext) -> Samples:
    """A token count near the upper end of the bucket."""
    held = weight(context, scheme_of(context.shape), BLOCK)
    yield long(context), held["codes"], held["scale"], bias(context)


def cost(shape: Shape) -> tuple[float, float]:
    """(bytes, flops), with inputs as they are before they are rounded."""
    return moved(shape, scheme_of(shape))
