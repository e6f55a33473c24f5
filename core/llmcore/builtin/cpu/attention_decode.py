"""attn.gqa.decode on a CPU: all rows in one gather and one scaled_dot_product_attention per layer.

The rows hold the same slots in every layer of a group. The first layer that runs after `plan` computes them.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F

from llmcore.api import AttnLimits, AttnRows, MetaWriter, OpContext
from llmcore.layers import ReferenceAttention, spec_of


class Decode:
    """Attention of rows with one query token each, padded to the longest row."""

    def __init__(self, context: OpContext) -> None:
        spec = spec_of(context)
        self.spec, self.granule = spec, context.granule
        # torch's flash kernel accepts grouped heads. In half types it is faster if the heads of a group are queries of
        # one head.
        self.fold = context.dtype != "f32"
        self._reference = ReferenceAttention(context)
        self._slots: torch.Tensor | None = None
        self._mask: torch.Tensor | None = None

    def workspace(self, limits: AttnLimits) -> None:
        """Does nothing: a CPU has no CUDA graphs, so `run` can allocate."""

    def plan(self, rows: AttnRows, into: MetaWriter) -> str:
        """Forget the last step."""
        self._slots = self._mask = None
        return "any"

    def run(
        self,
        q: torch.Tensor,
        k_new: torch.Tensor,
        v_new: torch.Tensor | None,
        kv: tuple[torch.Tensor, ...],
        meta: Mapping[str, torch.Tensor],
        out: torch.Tensor,
        lse: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See protocols.AttentionKernel."""
        if lse is not None:
            return self._reference.run(q, k_new, v_new, kv, meta, out, lse)
        if self._slots is None:
            self._slots, self._mask = self._where(meta, q.dtype)
        spec, rows = self.spec, len(q)
        # torch gathers rows of a matrix several times faster than slices of a three-dimensional tensor.
        keys, values = (
            pool.view(len(pool), -1).index_select(0, self._slots).view(rows, -1, spec.kv_heads, spec.key_size)
            for pool in kv
        )
        keys, values = keys.transpose(1, 2), values.transpose(1, 2)
        queries = q.reshape(rows, spec.kv_heads, -1, spec.key_size) if self.fold else q.unsqueeze(2)
        y = F.scaled_dot_product_attention(
            queries, keys, values, self._mask, scale=spec.scale, enable_gqa=not self.fold
        )
        out.copy_(y.view_as(out))
        return out

    def _where(self, meta: Mapping[str, torch.Tensor], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Slots [rows x longest] and the additive mask [rows, 1, 1, longest], None if all rows are equally long.

        Padding repeats a row's last slot.
        """
        # A padding row of a captured step has no keys. It gets one here, and its result is never read.
        lengths = meta["kv_len"].long().clamp(min=1)
        first = (
            (lengths - self.spec.window).clamp(min=0) if self.spec.window is not None else torch.zeros_like(lengths)
        )
        longest = int((lengths - first).max())
        tokens = first[:, None] + torch.arange(longest)
        beyond = tokens >= lengths[:, None]
        tokens = torch.minimum(tokens, lengths[:, None] - 1)
        table = meta["table"].index_select(0, meta["request"])
        granules = table.gather(1, tokens // self.granule if self.granule > 1 else tokens).long()
        slots = granules * self.granule + tokens % self.granule if self.granule > 1 else granules
        if not bool(beyond.any()):
            return slots.flatten(), None
        mask = torch.zeros(beyond.shape, dtype=dtype).masked_fill_(beyond, -torch.inf)
        return slots.flatten(), mask[:, None, None, :]


def make(context: OpContext) -> Decode:
    """The kernel for `context`, whose shape is an AttnSpec."""
    return Decode(context)
