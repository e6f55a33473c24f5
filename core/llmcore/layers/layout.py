"""The base class of KV layouts, and the layout `token`. A layout stores keys and values of one group of layers."""

from __future__ import annotations

import hashlib
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
"""The KV of one layer: the tensors of its pool, which have a row per slot, then the layout's `constants`."""


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

    What is stored is what is attended: `gather` gives the same numbers for a token as `write` left in its k and v. So
    a prefix hit, a chunk and a recomputed token attend to equal keys and values.
    """

    sharded = True
    joined = False

    def __init__(self, group: KVGroupSpec, granule: int, dtype: DType) -> None:
        self.group = group
        self.granule = granule
        self.dtype = DTYPES[dtype]
        self.whole, self.first_head = group, 0
        """The group with the KV heads of all ranks, and the first of them that this rank holds."""

    @property
    @abstractmethod
    def bytes(self) -> int:
        """Size of one granule in bytes, summed over all layers of the group."""

    @abstractmethod
    def layer_tensors(self, granules: int, device: torch.device) -> KV:
        """A new pool of `granules` granules for one layer. Slots that were never written hold finite numbers."""

    def constants(self, layer: int) -> tuple[torch.Tensor, ...]:
        """The tensors that a layer's `write`, `gather` and kernels need beside its pool, such as fixed scales.

        They are on the CPU.

        All layers have the same number of constants, and all ranks have the same ones.
        """
        return ()

    def own_constants(self, layer: int) -> tuple[torch.Tensor, ...]:
        """The part of `constants` for the KV heads of this rank, which `tensors` appends to the pool.

        By default this is the whole.
        """
        return self.constants(layer)

    @abstractmethod
    def write(self, kv: KV, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Store k [T, kv_heads, key_size] and v [T, kv_heads, value_size] at `slots` [T] int64.

        A layout that rounds overwrites k and v with the numbers that `gather` returns for them, to the bit.
        """

    @abstractmethod
    def gather(self, kv: KV, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(k, v) at `slots` [N], in the shapes that `write` takes and in the model's dtype."""

    def scatter(self, kv: KV, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Store keys and values that `gather` returned. By default this is `write`."""
        self.write(kv, slots, k, v)

    def copy(self, kv: KV, src: torch.Tensor, dst: torch.Tensor) -> None:
        """Copy granules `src` [N] onto granules `dst` [N], bit for bit, in every tensor of one layer."""
        for tensor in map(_rows, self.pool(kv)):
            granules = tensor.view(len(tensor) // self.granule, self.granule, *tensor.shape[1:])
            granules.index_copy_(0, dst, granules.index_select(0, src))

    def export(self, kv: KV, slots: torch.Tensor) -> KV:
        """The pool's rows at `slots` [N], as they are stored: [N, ...] of each tensor. `identity` says of what."""
        return tuple(_rows(tensor).index_select(0, slots).view(tensor.dtype) for tensor in self.pool(kv))

    def restore(self, kv: KV, slots: torch.Tensor, raw: KV) -> None:
        """Store rows that `export` of a layout with the same `identity` returned, to the bit."""
        for tensor, rows in zip(self.pool(kv), raw, strict=True):
            _rows(tensor).index_copy_(0, slots, _rows(rows))

    @property
    def identity(self) -> str:
        """Names what `export` returns: the layout, the group, and a digest of their sizes, dtype and constants."""
        group = self.group
        digest = hashlib.sha256(f"{group} {self.dtype}".encode())
        for layer in group.layers:
            for constant in self.constants(layer):
                digest.update(constant.flatten().view(torch.uint8).numpy().tobytes())
        return f"{group.layout}/{group.name}/{digest.hexdigest()[:16]}"

    def pool(self, kv: KV) -> KV:
        """The tensors of `kv` that have a row per slot, without the constants."""
        return kv[: len(kv) - len(self.constants(self.group.layers[0]))]

    def tensors(self, granules: int, device: torch.device) -> Mapping[int, KV]:
        """The KV of all layers of the group, by layer index."""
        return {
            layer: (*self.layer_tensors(granules, device), *(part.to(device) for part in self.own_constants(layer)))
            for layer in self.group.layers
        }


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` [N, ...], as bytes if its elements are bytes: torch cannot copy rows of float8."""
    return tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor


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
