"""What the kernels for linears share on the host: sizes, memory limits and buffers."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from llmcore.api import OpContext
from llmcore.layers import DTYPES

GATED = "linear_silu_and_mul"
"""The op whose kernels also multiply silu(gate) with up."""

UNKNOWN_PROCESSORS = 128

TMA_ALIGNED = 16
"""Bytes to which TMA wants addresses and row strides."""

_SHARED: Mapping[int, int] = {80: 164, 86: 100, 87: 164, 89: 100, 90: 228, 100: 228, 103: 228, 120: 100, 121: 100}
"""Compute capability -> KiB of shared memory per multiprocessor; a block can have all but 1 of it."""


class Sizes(NamedTuple):
    """One linear's, in elements: `outputs` of the op, half as many as the weight has rows where it is gated."""

    outputs: int
    inputs: int


def known_sizes(context: OpContext) -> Sizes | None:
    """What the context says, None where it names no shape."""
    outputs = context.shape.get("size" if context.op == GATED else "outputs")
    inputs = context.shape.get("inputs")
    return Sizes(int(outputs), int(inputs)) if outputs is not None and inputs is not None else None


def element_bytes(context: OpContext) -> int:
    """Bytes of a weight."""
    return DTYPES[context.dtype].itemsize


def shared_bytes(context: OpContext, blocks: int = 1) -> int:
    """Shared memory that each of `blocks` resident blocks can have."""
    kib = _SHARED.get(context.device.capability or 0, 100)
    return (kib // blocks - 1) * 1024


def power_of_two(number: int) -> int:
    """The smallest one that is not less."""
    return 1 << max(number - 1, 0).bit_length()


def processors(context: OpContext) -> int:
    """Multiprocessors."""
    return context.device.processors or UNKNOWN_PROCESSORS


@cache
def buffer(where: torch.device, dtype: torch.dtype, size: int) -> torch.Tensor:
    """`size` zeros, the same tensor for all kernels of a device; they run one after another in one stream."""
    return torch.zeros(size, dtype=dtype, device=where)


def by_torch(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, gated: bool) -> torch.Tensor:
    """The result by torch, for token counts that a kernel for few is not meant for."""
    y = F.linear(x, weight, bias)
    if not gated:
        return y
    gate, up = y.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)
