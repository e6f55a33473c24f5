"""linear.w8a16, a composite: linear.w4a16 with codes of 8 bits, int8 or float8 e4m3."""

from __future__ import annotations

from llmcore.ops import Shape

from llmcore_quantization.canonical import Scheme
from llmcore_quantization.ops import shape_of
from llmcore_quantization.ops.linear_w4a16 import TOLERANCE, cost, expand, long_samples, reference, samples

__all__ = ["SHAPES", "TOLERANCE", "cost", "expand", "long_samples", "reference", "samples"]

SHAPES: tuple[Shape, ...] = (
    shape_of(Scheme(codes="i8", scale="f32"), 72, 51, bias=True),
    shape_of(Scheme(codes="e4m3", scale="f32"), 128, 64, bias=False),
    shape_of(Scheme(codes="i8", group=32, zeros=True, ordered=True), 96, 40, bias=False),
    shape_of(Scheme(codes="e4m3", group=128, scale="f32"), 256, 33, bias=True),
)
"""A scale per row, groups, zeros, and groups in another order (GPTQ's desc_act)."""
