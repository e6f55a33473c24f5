"""The base class of KV layouts, and the layout `token`. A layout stores keys and values of one group of layers."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping

import numpy as np
import torch

from llmcore.api.models import KVGroupSpec
from llmcore.api.specs import DType
from llmcore.ops import DTYPES

_LINE = 64
"""Bytes of a cache line."""

KV = tuple[torch.Tensor, ...]
"""The KV pool of one layer. The layout decides which tensors it has."""


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor of zeros. In host memory the operating system allocates a page only when it is written."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    size = math.prod(shape) * dtype.itemsize
    pool = np.zeros(size + _LINE, np.uint8)
    start = -pool.ctypes.data % _LINE
    return torch.from_numpy(pool[start : start + size]).view(dtype).view(shape)


class Layout(ABC):
    """The storage of one KV group: a pool per layer. The unit of allocation, a granule, holds `granule` tokens.

    A slot is granule number x `granule` + offset. `sharded`: True if each rank holds its own KV heads, False if all
    ranks hold the same KV. `joined`: True if a token's value is the first `value_size` elements of its key, so that
    `write` does not need v.
    """

    sharded = True
    joined = False

    def __init__(self, group: KVGroupSpec, granule: int, dtype: DType) -> None:
        self.group = group
        self.granule = granule
        self.dtype = DTYPES[dtype]

    @property
    @abstractmethod
    def bytes(self) -> int:
        """Size of one granule in bytes, summed over all layers of the group."""

    @abstractmethod
    def layer_tensors(self, granules: int, device: torch.device) -> KV:
        """A new pool of `granules` granules for one layer. Slots that were never written hold finite numbers."""

    @abstractmethod
    def write(self, kv: KV, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Store k [T, kv_heads, key_size] and v [T, kv_heads, value_size] at `slots` [T] int64."""

    @abstractmethod
    def gather(self, kv: KV, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(k, v) at `slots` [N], in the shapes that `write` takes and in the model's dtype."""

    def scatter(self, kv: KV, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Store keys and values that `gather` returned. By default this is `write`."""
        self.write(kv, slots, k, v)

    def copy(self, kv: KV, src: torch.Tensor, dst: torch.Tensor) -> None:
        """Copy granules `src` [N] onto granules `dst` [N], bit for bit, in every tensor of one layer."""
        for tensor in kv:
            granules = tensor.view(-1, self.granule, *tensor.shape[1:])
            granules.index_copy_(0, dst, granules.index_select(0, src))

    def tensors(self, granules: int, device: torch.device) -> Mapping[int, KV]:
        """The pools of all layers of the group, by layer index."""
        return {layer: self.layer_tensors(granules, device) for layer in self.group.layers}


class TokenLayout(Layout):
    """Layout `token`: one slot per token, in the model's dtype.

    A layer has keys [slots, kv_heads, key_size] and values [slots, kv_heads, value_size].
    """

    @property
    def bytes(self) -> int:
        """Bytes of one granule over all layers."""
        group = self.group
        per_token = group.kv_heads * (group.key_size + group.value_size) * self.dtype.itemsize
        return per_token * self.granule * len(group.layers)

    def layer_tensors(self, granules: int, device: torch.device) -> KV:
        """A pool of zeros for one layer."""
        slots, heads = granules * self.granule, self.group.kv_heads
        return (
            zeros((slots, heads, self.group.key_size), self.dtype, device),
            zeros((slots, heads, self.group.value_size), self.dtype, device),
        )

    def write(self, kv: KV, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Store keys and values at `slots`."""
        kv[0].index_copy_(0, slots, k)
        kv[1].index_copy_(0, slots, v)

    def gather(self, kv: KV, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The keys and values at `slots`."""
        return kv[0].index_select(0, slots), kv[1].index_select(0, slots)
