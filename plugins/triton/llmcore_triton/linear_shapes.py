"""The host part that the kernels for linears share: sizes, memory limits and buffers."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from llmcore.api import OpContext
from llmcore.layers import DTYPES

EIGHT_BITS = frozenset({"linear.w8a8", "linear.fp8_block"})
"""The ops whose kernels multiply codes of 8 bits with each other."""

UNKNOWN_PROCESSORS = 128

TMA_ALIGNED = 16
"""Alignment in bytes that TMA requires of addresses and row strides."""

MOST_REGISTERS = 255
"""Those of a thread, at most."""

BARRIERS = 1024
"""Upper bound of the bytes of shared memory for TMA's barriers."""

_REGISTERS = 65536
"""Those of a multiprocessor."""

_SHARED: Mapping[int, int] = {80: 164, 86: 100, 87: 164, 89: 100, 90: 228, 100: 228, 103: 228, 120: 100, 121: 100}
"""Compute capability -> KiB of shared memory per multiprocessor. A block can have all but 1 KiB of it."""


class Sizes(NamedTuple):
    """The sizes of one linear, in elements. `outputs`: those of the op, half of the weight's rows if it is gated."""

    outputs: int
    inputs: int


def is_gated(context: OpContext) -> bool:
    """Returns True if the op also multiplies silu(gate) with up, as its name's end says."""
    return context.op.endswith("_silu_and_mul")


def known_sizes(context: OpContext) -> Sizes | None:
    """Returns the sizes that the context gives, or None if it has no shape."""
    outputs = context.shape.get("size" if is_gated(context) else "outputs")
    inputs = context.shape.get("inputs")
    return Sizes(int(outputs), int(inputs)) if outputs is not None and inputs is not None else None


def element_bytes(context: OpContext) -> int:
    """Returns the bytes of a weight that the kernels multiply."""
    return 1 if context.op in EIGHT_BITS else DTYPES[context.dtype].itemsize


def shared_bytes(context: OpContext, blocks: int = 1) -> int:
    """Returns the shared memory that each of `blocks` resident blocks can have."""
    kib = _SHARED.get(context.device.capability or 0, 100)
    return (kib // blocks - 1) * 1024


def registers_of(threads: int) -> int:
    """Returns the registers that each thread can have if `threads` share a multiprocessor."""
    return min(_REGISTERS // threads // 8 * 8, MOST_REGISTERS)


def power_of_two(number: int) -> int:
    """Returns the smallest power of two that is not below `number`."""
    return 1 << max(number - 1, 0).bit_length()


def processors(context: OpContext) -> int:
    """Returns the number of multiprocessors."""
    return context.device.processors or UNKNOWN_PROCESSORS


@cache
def buffer(where: torch.device, dtype: torch.dtype, size: int) -> torch.Tensor:
    """`size` elements, which are zeros before the first use.

    All kernels of a device share the tensor, since they run one after another in one stream. So a kernel that counts
    in int32 leaves zeros again. Partial sums in f32 stay, and no kernel may rely on what it finds there.
    """
    return torch.zeros(size, dtype=dtype, device=where)


def by_torch(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, gated: bool) -> torch.Tensor:
    """Returns torch's result, for token counts above those of the kernels for few."""
    y = F.linear(x, weight, bias)
    if not gated:
        return y
    gate, up = y.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)
