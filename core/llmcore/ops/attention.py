"""Shared by the attention ops: their definition in torch, and the reference kernel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import torch

from llmcore.api.errors import ConfigError
from llmcore.api.models import AttnSpec
from llmcore.api.protocols import AttnLimits, AttnRows, MetaWriter
from llmcore.api.specs import OpContext
from llmcore.ops import Shape, size

TOLERANCE = {"f32": 2e-5, "f16": 5e-3, "bf16": 2e-2}


def shape_of(spec: AttnSpec) -> dict[str, Any]:
    """The fields of an AttnSpec, as the shape of an OpContext."""
    return asdict(spec)


def spec_of(context: OpContext) -> AttnSpec:
    """The AttnSpec that an OpContext's shape holds."""
    return AttnSpec(**context.shape)  # type: ignore[arg-type]


def attend(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, spec: AttnSpec
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of q [n, heads, key_size] over keys [L, kv_heads, key_size] and values [L, kv_heads, value_size].

    The queries belong to the last n of the L tokens. Returns out [n, heads, value_size] and the log-sum-exp of the
    scaled scores [n, heads], both f32.
    """
    n, length, group = q.shape[0], keys.shape[0], spec.heads // spec.kv_heads
    grouped = q.float().view(n, spec.kv_heads, group, spec.key_size)
    scores = torch.einsum("nkgd,lkd->nkgl", grouped, keys.float()) * spec.scale
    if spec.soft_cap is not None:
        scores = torch.tanh(scores / spec.soft_cap) * spec.soft_cap
    seen = visible(n, length, spec).to(q.device)
    scores = scores.masked_fill(~seen[:, None, None, :], -torch.inf)
    lse = scores.logsumexp(-1)
    out = torch.einsum("nkgl,lkd->nkgd", (scores - lse.unsqueeze(-1)).exp(), values.float())
    return out.reshape(n, spec.heads, spec.value_size), lse.reshape(n, spec.heads)


def visible(n: int, length: int, spec: AttnSpec) -> torch.Tensor:
    """The mask [n, length] bool: True where one of the last n of `length` tokens sees a token."""
    key = torch.arange(length)
    query = torch.arange(length - n, length)[:, None]
    seen = key <= query if spec.mask == "causal" else torch.ones(n, length, dtype=torch.bool)
    if spec.window is not None:
        seen = seen & (key > query - spec.window)
    return seen


def token_slots(table: torch.Tensor, first: int, last: int, granule: int) -> torch.Tensor:
    """The slots [last - first] int64 of tokens `first` to `last` (exclusive), from one row of a table of granules."""
    tokens = torch.arange(first, last, device=table.device)
    if granule == 1:
        return table[first:last].long()
    return table[tokens // granule].long() * granule + tokens % granule


def cost(shape: Shape) -> tuple[float, float]:
    """(bytes, flops): the KV of `kv_len` tokens is read once for `tokens` queries."""
    kv_len, tokens, element = size(shape, "kv_len"), size(shape, "tokens"), size(shape, "element", 2)
    width = size(shape, "key_size") + size(shape, "value_size")
    moved = kv_len * size(shape, "kv_heads") * width + tokens * size(shape, "heads") * width
    return float(moved * element), 2.0 * tokens * kv_len * size(shape, "heads") * width


LAYOUTS = ("token",)
"""Layouts that store the keys and values of every head side by side."""

SHAPES: tuple[Shape, ...] = tuple(
    shape_of(spec)
    for spec in (
        AttnSpec(heads=9, kv_heads=3, key_size=16, value_size=16, scale=0.25),
        AttnSpec(heads=5, kv_heads=1, key_size=8, value_size=8, scale=0.3),
        AttnSpec(heads=4, kv_heads=4, key_size=16, value_size=16, scale=0.25, window=5),
    )
)
"""Groups of odd sizes, one KV head, a window."""


Sample = tuple[AttnRows]
"""A sample of an attention op: the rows of a step. The check makes queries and KV for them."""


def rows(n_query: Sequence[int], kv_len: Sequence[int]) -> Sample:
    """The sample whose rows have these numbers of query tokens and of KV tokens."""
    return (AttnRows(n_query=np.asarray(n_query, np.int32), kv_len=np.asarray(kv_len, np.int32)),)


BLOCK = 64
"""Queries that the reference computes at a time, to bound the memory of scores."""


class ReferenceAttention:
    """The reference AttentionKernel, for rows of any length and any layout. It reads KV only through the table."""

    def __init__(self, context: OpContext) -> None:
        self.spec = spec_of(context)
        self.granule = context.granule
        self._gather = context.gather or self._plain
        if self.spec.sinks or self.spec.mask not in ("causal", "full"):
            raise ConfigError(f"{context.op}: the torch reference has no sinks and no {self.spec.mask!r} mask")

    def workspace(self, limits: AttnLimits) -> None:
        """Does nothing: `run` allocates."""

    def plan(self, rows: AttnRows, into: MetaWriter) -> str:
        """Uploads nothing, and returns the same graph key for all steps."""
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
        """Compute one row after the other; see protocols.AttentionKernel."""
        borders = meta["q_start"].tolist()
        for row, (request, length) in enumerate(zip(meta["request"].tolist(), meta["kv_len"].tolist(), strict=True)):
            last = borders[row + 1]
            if borders[row] == last:
                continue
            slots = token_slots(meta["table"][request], 0, length, self.granule)
            keys, values = self._gather(kv, slots)
            for first in range(borders[row], last, BLOCK if self.spec.mask == "causal" else length):
                stop = min(first + BLOCK, last) if self.spec.mask == "causal" else last
                # `attend` takes its queries for the last tokens, so the keys must end with this block's tokens.
                end = length - (last - stop)
                part, part_lse = attend(q[first:stop], keys[:end], values[:end], self.spec)
                out[first:stop] = part.to(out.dtype)
                if lse is not None:
                    lse[first:stop] = part_lse
        return out

    def _plain(self, kv: tuple[torch.Tensor, ...], slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys are in the first tensor. Values are in the last one, or its rows begin with them."""
        return kv[0][slots], kv[-1][slots, :, : self.spec.value_size]
