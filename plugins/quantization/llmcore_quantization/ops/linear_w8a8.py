"""linear.w8a8, a composite: x W^T + b, where W has codes of 8 bits with a scale per row, and x is rounded alike.

Without an `input_scale` each token has a scale of its own: its largest magnitude becomes 127 (int8) or 448 (float8
e4m3). A kernel multiplies the codes and applies both scales to the sum.
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
"""An input halfway between two codes may become either, as a kernel divides by the scale or multiplies by its inverse.
"""

SHAPES: tuple[Shape, ...] = (
    shape_of(Scheme(codes="i8", scale="f32", inputs="row"), 72, 51, bias=True),
    shape_of(Scheme(codes="i8", scale="f32", inputs="static"), 128, 64, bias=False),
    shape_of(Scheme(codes="e4m3", scale="f32", inputs="row"), 128, 64, bias=False),
    shape_of(Scheme(codes="e4m3", scale="f32", inputs="static"), 72, 51, bias=True),
)


def reference(
    x: torch.Tensor,
    codes: torch.Tensor,
    scale: torch.Tensor,
    input_scale: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """x [T, inputs], codes [outputs, inputs], scale [outputs, 1], input_scale [1] f32 or None -> [T, outputs].

    The product of the rounded inputs and the dequantized weight in f32, rounded once to the type of x.
    """
    y = F.linear(rounded(x, codes.dtype, scale=input_scale), dequantized(codes, scale))
    return (y if bias is None else y + bias.float()).to(x.dtype)


def expand(context: OpContext, part: Callable[..., Op]) -> Op:
    """The chosen `linear` with the rounded inputs and the dequantized weight, both in the type of x."""
    linear = plain(context, part)

    def run(
        x: torch.Tensor,
        codes: torch.Tensor,
        scale: torch.Tensor,
        input_scale: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        seen = rounded(x, codes.dtype, scale=input_scale).to(x.dtype)
        y: torch.Tensor = linear(seen, dequantized(codes, scale, dtype=x.dtype), bias)
        return y

    return run


def samples(context: OpContext) -> Samples:
    """Tokens with an outlier and without any input; a static scale that the outlier exceeds."""
    held, inputs = weight(context, scheme_of(context.shape)), sizes(context)[0]
    for tokens in SAMPLE_TOKENS[context.bucket]:
        x = uneven(draw(context, tokens, inputs))
        yield x, held["codes"], held["scale"], _input_scale(context, x), bias(context)


def long_samples(context: OpContext) -> Samples:
    """A token count near the upper end of the bucket."""
    held, x = weight(context, scheme_of(context.shape)), long(context)
    yield x, held["codes"], held["scale"], _input_scale(context, x), bias(context)


def cost(shape: Shape) -> tuple[float, float]:
    """(bytes, flops), with inputs as they are before they are rounded."""
    return moved(shape, scheme_of(shape))


def _input_scale(context: OpContext, x: torch.Tensor) -> torch.Tensor | None:
    return torch.full((1,), 0.03, device=x.device) if context.shape["static"] else None
