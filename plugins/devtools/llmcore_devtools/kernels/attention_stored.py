"""Cases for attention kernels whose layout the op's samples do not know: the same KV, stored in that layout."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Protocol

import torch
from llmcore.api.models import KVGroupSpec
from llmcore.api.protocols import AttentionKernel, AttnLimits, AttnRows, MetaWriter
from llmcore.api.specs import KVLayoutSpec, OpContext
from llmcore.ops.attention import spec_of, token_slots
from llmcore.registry.loader import load
from llmcore.registry.registry import Registry

from llmcore_devtools.kernels.attention_cases import AttnCase, cases_of

KV = tuple[torch.Tensor, ...]


class Stores(Protocol):
    """The part of a llmcore.layers.Layout that these cases use."""

    granule: int
    joined: bool

    def layer_tensors(self, granules: int, device: torch.device) -> KV: ...
    def write(self, kv: KV, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None: ...
    def scatter(self, kv: KV, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None: ...
    def gather(self, kv: KV, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]: ...


def over_its_layout(registry: Registry, module: Any, context: OpContext, *kernels: Any) -> tuple[Any, ...]:
    """(op's `module`, *`kernels`) as they are; for attention over a layout that the op's samples do not know, both
    adapted to that layout.

    The layout is made for the heads of `context`. Raises ConfigError if no plugin brings it.
    """
    if not context.op.startswith("attn.") or context.layout in getattr(module, "LAYOUTS", (context.layout,)):
        return module, *kernels
    spec, name = spec_of(context), str(context.layout)
    heads, key, value = spec.kv_heads, spec.key_size, spec.value_size
    group = KVGroupSpec(name="kv", layers=(0,), layout=name, kv_heads=heads, key_size=key, value_size=value)
    layout: Stores = load(registry.find(KVLayoutSpec, name).make)(group, context.granule, context.dtype)
    return StoredSamples(module, layout), *(OverPool(kernel, layout) for kernel in kernels)


class StoredSamples:
    """The samples of `module` with the keys and values that `layout` returns, so that a layout may quantize."""

    def __init__(self, module: Any, layout: Stores) -> None:
        self.module, self.layout = module, layout
        self.TOLERANCE = module.TOLERANCE

    def samples(self, context: OpContext) -> Iterator[tuple[AttnCase]]:
        """The op's samples."""
        for (case,) in cases_of(self.module, context, self.module.samples(context)):
            yield (_given_back(case, self.layout),)

    def long_samples(self, context: OpContext) -> Iterator[tuple[AttnCase]]:
        """The op's long samples."""
        for (case,) in cases_of(self.module, context, self.module.long_samples(context), long=True):
            yield (_given_back(case, self.layout),)


class OverPool:
    """An AttentionKernel over plain keys and values. It stores them in a pool of `layout` and calls `kernel`."""

    def __init__(self, kernel: AttentionKernel, layout: Stores) -> None:
        self.kernel, self.layout = kernel, layout

    def workspace(self, limits: AttnLimits) -> None:
        """The kernel's."""
        self.kernel.workspace(limits)

    def plan(self, rows: AttnRows, into: MetaWriter) -> str:
        """The kernel's."""
        return self.kernel.plan(rows, into)

    def run(
        self,
        q: torch.Tensor,
        k_new: torch.Tensor,
        v_new: torch.Tensor | None,
        kv: KV,
        meta: Mapping[str, torch.Tensor],
        out: torch.Tensor,
        lse: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The kernel's, over the pool."""
        keys, values, slots = kv[0], kv[-1], _held(kv[0])
        pool = self.layout.layer_tensors(len(keys) // self.layout.granule, keys.device)
        self.layout.scatter(pool, slots, keys[slots], values[slots])
        return self.kernel.run(q, k_new, v_new, pool, meta, out, lse)


def _held(keys: torch.Tensor) -> torch.Tensor:
    """The slots that rows hold. A case fills the other slots with NaN."""
    return keys.flatten(1).isfinite().all(1).nonzero()[:, 0]


def _given_back(case: AttnCase, layout: Stores) -> AttnCase:
    keys, values = case.kv[0], case.kv[-1]
    slots = _held(keys)
    pool = layout.layer_tensors(len(keys) // layout.granule, keys.device)
    layout.write(pool, slots, keys[slots], keys[slots, :, : values.shape[2]] if layout.joined else values[slots])
    k, v = layout.gather(pool, slots)
    kv: Any = (torch.full_like(keys, torch.nan).index_copy_(0, slots, k),)
    if not layout.joined:
        kv += (torch.full_like(values, torch.nan).index_copy_(0, slots, v),)
    granule = case.context.granule
    new = torch.cat(
        [
            token_slots(case.meta["table"][request], int(length - n), int(length), granule)
            for request, n, length in zip(
                case.meta["request"].tolist(), case.rows.n_query, case.rows.kv_len, strict=True
            )
        ]
    )
    return replace(case, kv=kv, k_new=kv[0][new], v_new=None if layout.joined else kv[1][new])
