"""add_rms_norm, a composite: residual + x, and its rms_norm."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from llmcore.api.specs import OpContext
from llmcore.ops import ROUNDING, Op, Shape, rms_norm, size

TOLERANCE = ROUNDING

IN_PLACE = ("x", "residual")

SHAPES = rms_norm.SHAPES


def reference(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """x, residual [T, size], weight [size] -> (normed sum, sum)."""
    total = residual + x
    return rms_norm.reference(total, weight, eps), total


def expand(context: OpContext, part: Callable[..., Op]) -> Op:
    """An addition, then the chosen rms_norm."""
    norm = part("rms_norm", **context.shape)

    def run(
        x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        total = residual + x
        return norm(total, weight, eps), total

    return run


def samples(context: OpContext) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor, float]]:
    """The samples of rms_norm, each with a usual residual and with one that cancels x."""
    for x, weight, eps in rms_norm.samples(context):
        yield x, x.flip(-1), weight, eps
        yield x, -x, weight, eps


def cost(shape: Shape) -> tuple[float, float]:
    """Two reads, two writes; five operations per element."""
    elements = size(shape, "tokens") * size(shape, "size")
    return 4.0 * elements * size(shape, "element", 2), 5.0 * elements
