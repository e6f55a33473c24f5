"""rms_norm_quant, a composite: rms_norm, and quantize_rows of its result in the model's type."""

from __future__ import annotations

from collections.abc import Callable

import torch
from llmcore.api import OpContext
from llmcore.ops import Op, Shape, rms_norm, size

from llmcore_quantization.ops import ROUNDED, Rows, distance, in_forms, quantizer

TOLERANCE = ROUNDED

SHAPES = in_forms(40, 256)

compared, samples = distance, rms_norm.samples


def make(context: OpContext) -> Op:
    """x [T, size], weight [size], eps -> (codes [T, size], scale [T, size / group] f32)."""
    return _joined(rms_norm.reference, quantizer(context))


def expand(context: OpContext, part: Callable[..., Op]) -> Op:
    """The chosen rms_norm, then quantize_rows."""
    return _joined(part("rms_norm", size=context.shape["size"]), quantizer(context, part))


def _joined(norm: Op, quantize: Callable[[torch.Tensor], Rows]) -> Op:
    def run(x: torch.Tensor, weight: torch.Tensor, eps: float) -> Rows:
        return quantize(norm(x, weight, eps))

    return run


def cost(shape: Shape) -> tuple[float, float]:
    """One read, one write of a byte and eight operations per element."""
    elements = size(shape, "tokens") * size(shape, "size")
    return elements * (size(shape, "element", 2) + 1.0), 8.0 * elements
