"""add_rms_norm_quant, a composite: residual + x, and rms_norm_quant of the sum."""

from __future__ import annotations

from collections.abc import Callable

import torch
from llmcore.api import OpContext
from llmcore.ops import Op, Shape, add_rms_norm, size

from llmcore_quantization.ops import ROUNDED, Rows, distance, in_forms, quantizer

TOLERANCE = ROUNDED

IN_PLACE = add_rms_norm.IN_PLACE

SHAPES = in_forms(40, 256)

compared, samples = distance, add_rms_norm.samples


def make(context: OpContext) -> Op:
    """x, residual [T, size], weight [size], eps -> (codes [T, size], scale [T, size / group] f32, sum [T, size])."""
    return _joined(add_rms_norm.reference, quantizer(context))


def expand(context: OpContext, part: Callable[..., Op]) -> Op:
    """The chosen add_rms_norm, then quantize_rows."""
    return _joined(part("add_rms_norm", size=context.shape["size"]), quantizer(context, part))


def _joined(norm: Op, quantize: Callable[[torch.Tensor], Rows]) -> Op:
    def run(
        x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        y, total = norm(x, residual, weight, eps)
        return *quantize(y), total

    return run


def cost(shape: Shape) -> tuple[float, float]:
    """Two reads, a write and a write of a byte; nine operations per element."""
    elements = size(shape, "tokens") * size(shape, "size")
    return elements * (3.0 * size(shape, "element", 2) + 1), 9.0 * elements
