"""The torch base of KV layouts: how one group of layers stores keys and values."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping

import numpy as np
import torch

from llmcore.models import KVGroupSpec
from llmcore.ops import DTYPES
from llmcore.specs import DType

_LINE = 64
"""Bytes of a cache line."""

KV = tuple[torch.Tensor, ...]
"""The pool of one layer; what is in it is the layout's own affair."""


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros; in host memory the operating system maps only what is written."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    size = math.prod(shape) * dtype.itemsize
    pool = np.zeros(size + _LINE, np.uint8)
    start = -pool.ctypes.data % _LINE
    return torch.from_numpy(pool[start : start + size]).view(dtype).view(shape)


class Layout(ABC):
    """Storage of one KV group: a pool per layer, `granule` tokens in each unit of allocation.

    A slot is granule x `granule` + offset. `sharded`: each rank holds its own KV heads; else all ranks hold the same.
    `joined`: a token's value is the first `value_size` elements of its key, so `write` needs no v.
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
        """Bytes of one granule over all layers of the group."""

    @abstractmethod
    def layer_tensors(self, granules: int, device: torch.device) -> KV:
        """A fresh pool of `granules` granules for one layer. Never-written slots hold finite numbers."""

    @abstractmethod
    def write(self, kv: KV, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Store k [T, kv_heads, key_size] and v [T, kv_heads, value_size] at `slots` [T] int64."""

    @abstractmethod
    def gather(self, kv: KV, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(k, v) at `slots` [N], as `write` took them, in the model's dtype."""

    def scatter(self, kv: KV, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Put back what `gather` gave; the same as `write` unless a layout says otherwise."""
        self.write(kv, slots, k, v)

    def copy(self, kv: KV, src: torch.Tensor, dst: torch.Tensor) -> None:
        """Copy granules `src` [N] onto granules `dst` [N], bit for bit, in every tensor of one layer."""
        for tensor in kv:
            granules = tensor.view(-1, self.granule, *tensor.shape[1:])
            granules.index_copy_(0, dst, granules.index_select(0, src))

    def tensors(self, granules: int, device: torch.device) -> Mapping[int, KV]:
        """The whole group's pools by layer index."""
        return {layer: self.layer_tensors(granules, device) for layer in self.group.layers}
