"""comm.all_reduce: the sum of the tensors of all ranks of a mesh group."""

from __future__ import annotations

from functools import partial

import torch

from llmcore.api.specs import OpContext
from llmcore.ops import ROUNDING, Op, Shape, size
from llmcore.ops.comm import SHAPES, Peers, moved, over, samples

__all__ = ["SHAPES", "TOLERANCE", "cost", "make", "samples"]

TOLERANCE = ROUNDING


def make(context: OpContext) -> Op:
    """(x [T, size]) -> [T, size] of x's dtype. Sums are made in f32 in rank order, so all ranks have the same bits."""
    return over(context, lambda peers: partial(_sum, peers), lambda x: x)


def _sum(peers: Peers, x: torch.Tensor) -> torch.Tensor:
    first, *others = (part.float() for part in peers.gathered(x))
    total = first.clone()
    for part in others:
        total += part
    return total.to(x.dtype)


def cost(shape: Shape) -> tuple[float, float]:
    """Each rank reads the rows of all, and writes their sum."""
    ranks = size(shape, "ranks")
    return moved(shape, ranks + 1), float((ranks - 1) * size(shape, "tokens") * size(shape, "size"))
