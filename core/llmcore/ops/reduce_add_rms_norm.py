"""reduce_add_rms_norm, a composite: the sum of x over the ranks of a mesh group, then add_rms_norm."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from llmcore.api.specs import OpContext
from llmcore.ops import ROUNDING, Op, Shape, add_rms_norm, comm, size

TOLERANCE = ROUNDING

IN_PLACE = ("x", "residual")

SHAPES: tuple[Shape, ...] = comm.SHAPES

reference = add_rms_norm.reference
"""For one rank, with which kernels are checked."""


def expand(context: OpContext, part: Callable[..., Op]) -> Op:
    """comm.all_reduce, then the chosen add_rms_norm."""
    add_norm = part("add_rms_norm", size=context.shape["size"])
    reduce = part("comm.all_reduce", **context.shape)

    def run(
        x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        normed: tuple[torch.Tensor, torch.Tensor] = add_norm(reduce(x), residual, weight, eps)
        return normed

    return run


def samples(context: OpContext) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor, float]]:
    """Those of add_rms_norm."""
    return add_rms_norm.samples(context)


def cost(shape: Shape) -> tuple[float, float]:
    """The cost of add_rms_norm, and a read of the rows of every other rank."""
    (moved, work), ranks = add_rms_norm.cost(shape), size(shape, "ranks")
    return moved + comm.moved(shape, ranks - 1), work
