"""comm.all_gather: the tensors of all ranks of a mesh group side by side, along the last dimension."""

from __future__ import annotations

from functools import partial

import torch

from llmcore.api.specs import OpContext
from llmcore.ops import Op, Shape, size
from llmcore.ops.comm import SHAPES, Peers, moved, over, samples

__all__ = ["SHAPES", "TOLERANCE", "cost", "make", "samples"]

TOLERANCE = {"f32": 0.0, "f16": 0.0, "bf16": 0.0}


def make(context: OpContext) -> Op:
    """(x [T, size]) -> [T, ranks size]: of each row the parts of all ranks, in rank order."""
    return over(context, lambda peers: partial(_joined, peers), lambda x: x)


def _joined(peers: Peers, x: torch.Tensor) -> torch.Tensor:
    return torch.cat(peers.gathered(x), -1)


def cost(shape: Shape) -> tuple[float, float]:
    """Each rank reads the rows of all, and writes them."""
    return moved(shape, 2 * size(shape, "ranks")), 0.0
