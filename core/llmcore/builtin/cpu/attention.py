"""attn.gqa.decode and attn.gqa.prefill on a CPU, through torch's scaled_dot_product_attention over gathered KV."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from llmcore.api import AttnLimits, AttnRows, MetaWriter, OpContext
from llmcore.layers import ReferenceAttention, spec_of, token_slots

SHORT = 256
"""Rows of up to this number of KV tokens compute in f32: it is not slower there, and half types lose most there."""

BLOCK = 256
"""Queries that share a mask. More would compute more scores that the mask discards; fewer need too many calls."""


class _Attention:
    """Shared by both kernels, which find their slots in the first layer after `plan` and keep them for all layers.

    The rows hold the same slots in every layer of a group.
    """

    def __init__(self, context: OpContext) -> None:
        self.spec, self.granule = spec_of(context), context.granule
        self._reference = ReferenceAttention(context)
        self._found: Any = None

    def workspace(self, limits: AttnLimits) -> None:
        """Does nothing: a CPU has no CUDA graphs, so `run` can allocate."""

    def plan(self, rows: AttnRows, into: MetaWriter) -> str:
        """Forget what the last step found."""
        self._found = None
        return "any"

    def _gather(self, kv: tuple[torch.Tensor, ...], slots: torch.Tensor, *shape: int) -> Iterator[torch.Tensor]:
        """Keys and values at `slots`, each [*shape, kv_heads, key_size]."""
        # torch gathers rows of a matrix several times faster than slices of a three-dimensional tensor.
        for pool in kv:
            rows = pool.view(len(pool), -1).index_select(0, slots)
            yield rows.view(*shape, self.spec.kv_heads, self.spec.key_size)


class Decode(_Attention):
    """attn.gqa.decode: rows of one query token each, padded to the longest row, in one call per layer."""

    def __init__(self, context: OpContext) -> None:
        super().__init__(context)
        # torch's flash kernel accepts grouped heads. In half types it is faster if the heads of a group are queries of
        # one head.
        self.fold = context.dtype != "f32"

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
        if self._found is None:
            self._found = self._where(meta, q.dtype)
        (slots, mask), spec, rows = self._found, self.spec, len(q)
        keys, values = (part.transpose(1, 2) for part in self._gather(kv, slots, rows, -1))
        queries = q.reshape(rows, spec.kv_heads, -1, spec.key_size) if self.fold else q.unsqueeze(2)
        y = F.scaled_dot_product_attention(queries, keys, values, mask, scale=spec.scale, enable_gqa=not self.fold)
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


@dataclass(frozen=True)
class _Block:
    """Queries `first` to `last` of a row over its tokens `low` to `high`.

    `mask` is None if every query sees all of them, and for a causal call.
    """

    first: int
    last: int
    low: int
    high: int
    mask: torch.Tensor | None = None


@dataclass(frozen=True)
class _Row:
    """Queries `first` to `last` of a step, computed in `dtype`.

    `slots`: where the row's KV lies; None for a whole prompt, which one causal call computes.
    """

    first: int
    last: int
    dtype: torch.dtype
    slots: torch.Tensor | None
    blocks: tuple[_Block, ...]


class Prefill(_Attention):
    """attn.gqa.prefill: rows of any number of query tokens, one call per block of queries or per whole prompt."""

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
        """Attend to cached and new tokens, for each row of a step; see protocols.AttentionKernel."""
        if lse is not None or v_new is None:
            return self._reference.run(q, k_new, v_new, kv, meta, out, lse)
        if self._found is None:
            self._found = self._where(meta, q.dtype)
        row: _Row
        for row in self._found:
            own = slice(row.first, row.last)
            read = (k_new[own], v_new[own]) if row.slots is None else self._gather(kv, row.slots, len(row.slots))
            queries, keys, values = (x.to(row.dtype).transpose(0, 1).unsqueeze(0) for x in (q[own], *read))
            for block in row.blocks:
                y = F.scaled_dot_product_attention(
                    queries[:, :, block.first : block.last],
                    keys[:, :, block.low : block.high],
                    values[:, :, block.low : block.high],
                    block.mask,
                    is_causal=row.slots is None,
                    scale=self.spec.scale,
                    enable_gqa=True,
                )
                out[row.first + block.first : row.first + block.last] = y[0].transpose(0, 1)
        return out

    def _where(self, meta: Mapping[str, torch.Tensor], dtype: torch.dtype) -> list[_Row]:
        borders, window = meta["q_start"].tolist(), self.spec.window
        rows = []
        for i, (request, length) in enumerate(zip(meta["request"].tolist(), meta["kv_len"].tolist(), strict=True)):
            first, last = borders[i], borders[i + 1]
            n = last - first
            start = 0 if window is None else max(0, length - n + 1 - window)
            kind = torch.float32 if length - start <= SHORT else dtype
            if n == length and (window is None or window >= n):
                rows.append(_Row(first, last, kind, None, (_Block(0, n, 0, n),)))
                continue
            slots = token_slots(meta["table"][request], start, length, self.granule)
            rows.append(_Row(first, last, kind, slots, self._blocks(n, length - start, kind)))
        return rows

    def _blocks(self, n: int, length: int, dtype: torch.dtype) -> tuple[_Block, ...]:
        """The last n of `length` tokens in blocks. A block reads the tokens that at least one of its queries sees."""
        blocks = []
        for first in range(0, n, BLOCK):
            last = min(first + BLOCK, n)
            high = length - n + last
            low = 0 if self.spec.window is None else max(0, length - n + first + 1 - self.spec.window)
            blocks.append(_Block(first, last, low, high, self._mask(last - first, high - low, dtype)))
        return tuple(blocks)

    def _mask(self, n: int, length: int, dtype: torch.dtype) -> torch.Tensor | None:
        """The additive mask [n, length] for the last n of `length` tokens; None if every query sees all."""
        if n == 1:
            return None
        blocked = torch.ones(n, length, dtype=torch.bool).triu_(length - n + 1)
        if self.spec.window is not None:
            blocked |= torch.ones(n, length, dtype=torch.bool).tril_(length - n - self.spec.window)
        return torch.zeros(n, length, dtype=dtype).masked_fill_(blocked, -torch.inf)
