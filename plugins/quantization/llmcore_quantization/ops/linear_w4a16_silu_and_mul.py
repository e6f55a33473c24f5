"""linear.w4a16_silu_and_mul, a composite: linear.w4a16 for gate and up, the gate's rows first, and silu_and_mul."""

from __future__ import annotations

from collections.abc import Callable

import torch
from llmcore.api import OpContext
from llmcore.ops import Op, Shape, linear_silu_and_mul, silu_and_mul

from llmcore_quantization.canonical import Scheme
from llmcore_quantization.ops import TOLD, linear_w4a16, outputs_of, shape_of
from llmcore_quantization.ops.linear_w4a16 import cost, long_samples, samples

__all__ = ["SHAPES", "TOLERANCE", "cost", "expand", "long_samples", "reference", "samples"]

TOLERANCE = linear_silu_and_mul.TOLERANCE

SHAPES: tuple[Shape, ...] = (
    shape_of(Scheme(codes="u4", group=32, zeros=True), 96, 102, True, "silu_and_mul"),
    shape_of(Scheme(codes="u4", group=128, scale="bf16"), 128, 128, False, "silu_and_mul"),
    shape_of(Scheme(codes="u4", group=64, zeros=True, ordered=True), 128, 80, False, "silu_and_mul"),
)


def reference(
    x: torch.Tensor,
    codes: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor | None = None,
    order: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """x [T, inputs], codes, scale, zero and order in the canonical form, bias [2 size] or None -> [T, size]."""
    return silu_and_mul.reference(linear_w4a16.reference(x, codes, scale, zero, order, bias))


def expand(context: OpContext, part: Callable[..., Op]) -> Op:
    """The chosen linear, then silu_and_mul."""
    shape, name = context.shape, context.op.removesuffix("_silu_and_mul")
    told = {field: shape[field] for field in ("inputs", "bias", *TOLD)}
    linear = part(name, outputs=outputs_of(shape), **told)
    return linear_silu_and_mul.Expanded(linear, part("silu_and_mul", size=shape["size"]))
