"""moe.experts.w8a16, a composite: moe.experts.w4a16 with codes of 8 bits, int8 or float8 e4m3."""

from __future__ import annotations

from llmcore_quantization.canonical import Scheme
from llmcore_quantization.ops.moe_experts_w4a16 import (
    IN_PLACE,
    STACKS,
    TOLERANCE,
    cost,
    expand,
    make,
    samples,
    shapes_of,
)

__all__ = ["IN_PLACE", "SHAPES", "STACKS", "TOLERANCE", "cost", "expand", "make", "samples"]

SHAPES = shapes_of(
    Scheme(codes="i8", scale="f32"),
    Scheme(codes="e4m3", group=128, scale="f32"),
    Scheme(codes="i8", group=32, zeros=True),
)
"""A scale per row, the blocks of published checkpoints, and groups with zeros."""
