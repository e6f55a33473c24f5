"""moe.fused.w8a16, a composite: moe.fused.w4a16 with codes of 8 bits, int8 or float8 e4m3."""

from __future__ import annotations

from llmcore_quantization.canonical import Scheme
from llmcore_quantization.ops.moe_fused_w4a16 import STACKS, TOLERANCE, cost, expand, make, samples, shapes_of

__all__ = ["SHAPES", "STACKS", "TOLERANCE", "cost", "expand", "make", "samples"]

SHAPES = shapes_of(
    Scheme(codes="i8", scale="f32"), Scheme(codes="e4m3", group=64, scale="f32"), Scheme(codes="i8", group=32)
)
