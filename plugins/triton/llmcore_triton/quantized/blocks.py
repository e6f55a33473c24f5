"""The scales of linear.fp8_block: those of blocks of 128 outputs, where all outputs of each block have the same.

The canonical scale has a row per output. Published checkpoints have one per 128 outputs, which the readers repeat. The
kernels take both, and read less of the latter.
"""

from __future__ import annotations

import torch
from llmcore.api import OpContext

BLOCK = 128
"""Outputs of a block, and the inputs of a group."""


def pack(codes: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns a weight with a scale [outputs / 128, groups], if the outputs of each block agree."""
    if len(scale) == len(codes) and len(codes) % BLOCK == 0:
        blocks = scale.view(-1, BLOCK, scale.shape[1])
        if torch.equal(blocks, blocks[:, :1].expand_as(blocks)):
            scale = blocks[:, 0].contiguous()
    return codes, scale


class Packs:
    """The packing of the kernels of linear.fp8_block. Those of linear.w8a8 keep their tensors as they are."""

    def __init__(self, context: OpContext) -> None:
        if group_of(context):
            self.packing, self.pack = "blocks", pack


def spread_of(codes: torch.Tensor, scale: torch.Tensor) -> int:
    """Returns the number of outputs that share a scale: 1 or 128."""
    return len(codes) // len(scale)


def group_of(context: OpContext) -> int:
    """Returns the inputs that share a scale, or 0 if a whole row does."""
    return int(context.shape.get("group") or 0)
