"""linear.fp8_block, a composite: linear.w8a8 with codes of float8 e4m3, and a scale for each group of 128 inputs.

x has such scales for each token: x_scale [T, inputs / 128]. The scales of published weights are for blocks of 128
outputs; here each output repeats its block's. A kernel multiplies the codes of a group and applies both scales to the
sum.
"""

from __future__ import annotations

from llmcore.ops import Shape

from llmcore_quantization.canonical import Scheme
from llmcore_quantization.ops import shape_of
from llmcore_quantization.ops.linear_w8a8 import TOLERANCE, cost, expand, long_samples, make, samples

__all__ = ["SHAPES", "TOLERANCE", "cost", "expand", "long_samples", "make", "samples"]

SHAPES: tuple[Shape, ...] = (
    shape_of(Scheme(codes="e4m3", group=128, scale="f32"), 256, 51, bias=True),
    shape_of(Scheme(codes="e4m3", group=128, scale="f32"), 128, 160, bias=False),
)
