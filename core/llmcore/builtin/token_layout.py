"""Layout `token`: keys and values of a token side by side in the model's dtype."""

from __future__ import annotations

import torch

from llmcore.layers.layout import KV, Layout, zeros


class TokenLayout(Layout):
    """One slot per token: keys [slots, kv_heads, key_size], values [slots, kv_heads, value_size]."""

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
