"""Layout `mla-latent`: one row per token. The value is the first part of that row."""

from __future__ import annotations

import torch
from llmcore.layers import KV, Layout, zeros


class LatentLayout(Layout):
    """One pool [slots, kv_heads, key_size] in the model's dtype. Latent attention has one KV head for all query
    heads."""

    sharded = False
    joined = True

    @property
    def bytes(self) -> int:
        """Returns the bytes of one granule over all layers. A row counts once."""
        group = self.group
        return group.kv_heads * group.key_size * self.dtype.itemsize * self.granule * len(group.layers)

    def layer_tensors(self, granules: int, device: torch.device) -> KV:
        """Returns zeros."""
        return (zeros((granules * self.granule, self.group.kv_heads, self.group.key_size), self.dtype, device),)

    def write(self, kv: KV, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor | None) -> None:
        """Store rows k [T, kv_heads, key_size]. v is a part of them and is not read."""
        kv[0].index_copy_(0, slots, k)

    def gather(self, kv: KV, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the rows, and their first `value_size` elements."""
        rows = kv[0].index_select(0, slots)
        return rows, rows[..., : self.group.value_size]
