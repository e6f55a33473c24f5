"""linear.w8a16_silu_and_mul, a composite: linear.w4a16_silu_and_mul with codes of 8 bits, int8 or float8 e4m3."""

from __future__ import annotations

from llmcore.ops import Shape

from llmcore_quantization.canonical import Scheme
from llmcore_quantization.ops import shape_of
from llmcore_quantization.ops.linear_w4a16_silu_and_mul import (
    TOLERANCE,
    cost,
    expand,
    long_samples,
    reference,
    samples,
)

__all__ = ["SHAPES", "TOLERANCE", "cost", "expand", "long_samples", "reference", "samples"]

SHAPES: tuple[Shape, ...] = (
    shape_of(Scheme(codes="i8", scale="f32"), 72, 102, True, "silu_and_mul"),
    shape_of(Scheme(codes="e4m3", group=64, scale="f32"), 128, 128, False, "silu_and_mul"),
)
