"""Cases for attention kernels whose layout the op's samples do not know: the same KV, stored in that layout."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from llmcore.api.specs import OpContext
from llmcore.ops import Shape
from llmcore.ops.attention import spec_of, token_slots
from llmcore.registry.registry import Registry

from llmcore_devtools.kernels.attention_cases import AttnCase, cases_of
from llmcore_devtools.kernels.write_stored import StoredWrites, Stores, layout_of


def over_its_layout(registry: Registry, module: Any, context: OpContext) -> tuple[Any, OpContext]:
    """(op's `module`, `context`) as they are; over a layout that the op's samples do not know, a module whose samples
    are stored in that layout, and for attention the context in which the reference reads them.

    The layout is made for the heads of `context`. Raises ConfigError if no plugin brings it, and DoesNotFit if it does
    not take these heads.
    """
    if context.layout in getattr(module, "LAYOUTS", (context.layout,)):
        return module, context
    if not context.op.startswith("attn."):
        return StoredWrites(registry, module, context), context
    spec = spec_of(context)
    layout = layout_of(registry, context, spec.kv_heads, spec.key_size, spec.value_size)
    return StoredSamples(module, layout), replace(context, gather=layout.gather)


class StoredSamples:
    """The samples of `module` over a pool of `layout`. What it loses, the reference lacks too."""

    def __init__(self, module: Any, layout: Stores) -> None:
        self.module, self.layout = module, layout
        self.TOLERANCE = module.TOLERANCE

    def samples(self, context: OpContext) -> Iterator[tuple[AttnCase]]:
        """The op's samples."""
        for (case,) in cases_of(self.module, context, self.module.samples(context)):
            yield (stored(case, self.layout),)

    def long_samples(self, context: OpContext) -> Iterator[tuple[AttnCase]]:
        """The op's long samples."""
        for (case,) in cases_of(self.module, context, self.module.long_samples(context), long=True):
            yield (stored(case, self.layout),)

    def timed(self, context: OpContext, tokens: int) -> Iterator[tuple[AttnCase]]:
        """The samples that the op times."""
        for (case,) in cases_of(self.module, context, self.module.timed(context, tokens)):
            yield (stored(case, self.layout),)

    def cost(self, shape: Shape) -> tuple[float, float]:
        """The op's, as if the layout did not quantize."""
        cost: tuple[float, float] = self.module.cost(shape)
        return cost


def stored(case: AttnCase, layout: Stores) -> AttnCase:
    """`case` with its KV in a pool of `layout`, and with the new keys and values that `layout` returns for it.

    All bits of slots that no row holds are 1: they read as NaN where numbers or scales can be NaN.
    """
    keys, values = case.kv[0], case.kv[-1]
    held = keys.flatten(1).isfinite().all(1).nonzero()[:, 0]
    kv = layout.tensors(len(keys) // layout.granule, keys.device)[0]
    for part in layout.pool(kv):
        part.view(torch.uint8).fill_(255)
    layout.write(kv, held, keys[held], keys[held, :, : values.shape[2]] if layout.joined else values[held])
    rows = zip(case.meta["request"].tolist(), case.rows.n_query, case.rows.kv_len, strict=True)
    new = [token_slots(case.meta["table"][row], int(last - n), int(last), layout.granule) for row, n, last in rows]
    k, v = layout.gather(kv, torch.cat(new))
    context = replace(case.context, gather=layout.gather)
    return replace(case, context=context, kv=kv, k_new=k, v_new=None if layout.joined else v)
