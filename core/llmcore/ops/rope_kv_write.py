"""rope_kv_write, a composite: rotate queries and keys, and write keys and values to the KV pool.

It expands to `rope` and the layout's own write, which the attention layer passes as the part `kv_write`.

What is stored is what is attended: over a layout that rounds, a kernel returns the keys, and leaves in `v` the values,
that the layout's `gather` gives back, to the bit. Its own write does the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from llmcore.api.specs import OpContext
from llmcore.ops import ROUNDING, Op, Shape, draw, rope, size

TOLERANCE = ROUNDING

IN_PLACE = ("qk", "v")

LAYOUTS = ("token",)

SHAPES: tuple[Shape, ...] = (
    {"heads": 3, "kv_heads": 1, "size": 16, "rotated": 16},
    {"heads": 4, "kv_heads": 2, "size": 16, "rotated": 8},
)


def reference(
    qk: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    kv: tuple[torch.Tensor, ...],
    slots: torch.Tensor,
) -> torch.Tensor:
    """qk [T, heads + kv_heads, size], v [T, kv_heads, value_size], cos and sin as for rope -> rotated qk, as stored.

    Also writes kv (token layout: keys [slots, kv_heads, size], values [slots, kv_heads, value_size]) at `slots` [T].
    """
    turned = rope.reference(qk, cos, sin)
    keys, values = kv
    keys.index_copy_(0, slots, turned[:, -v.shape[1] :])
    values.index_copy_(0, slots, v)
    return turned


def expand(context: OpContext, part: Callable[..., Op]) -> Op:
    """rope, then the layout's write."""
    heads, kv_heads = size(context.shape, "heads"), size(context.shape, "kv_heads")
    rotate = part("rope", heads=heads + kv_heads, size=context.shape["size"], rotated=context.shape["rotated"])
    write = part("kv_write")

    def run(
        qk: torch.Tensor,
        v: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        kv: tuple[torch.Tensor, ...],
        slots: torch.Tensor,
    ) -> torch.Tensor:
        turned: torch.Tensor = rotate(qk, cos, sin)
        write(kv, slots, turned[:, heads:], v)
        return turned

    return run


def samples(
    context: OpContext,
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, tuple[torch.Tensor, ...], torch.Tensor]]:
    """The samples of rope, with scattered slots in a pool full of NaN."""
    kv_heads = size(context.shape, "kv_heads", 2)
    for x, cos, sin in rope.samples(context):
        tokens, _, width = x.shape
        qk = torch.cat((x, draw(context, tokens, kv_heads, width, seed=1)), 1)
        slots = torch.randperm(2 * tokens + 1, generator=torch.Generator().manual_seed(2))[:tokens]
        pool = torch.full((2 * tokens + 1, kv_heads, width), torch.nan, dtype=x.dtype)
        yield qk, draw(context, tokens, kv_heads, width, seed=3), cos, sin, (pool, pool.clone()), slots


def long_samples(context: OpContext) -> Iterator[tuple[Any, ...]]:
    """Queries, keys and values as parts of the rows of one tensor, as a projection returns them."""
    for qk, v, *rest in samples(context):
        joined = torch.cat((qk.flatten(1), v.flatten(1)), 1)
        border = qk.shape[1] * qk.shape[2]
        yield joined[:, :border].view(qk.shape), joined[:, border:].view(v.shape), *rest


def cost(shape: Shape) -> tuple[float, float]:
    """The cost of rope, plus the write of the KV."""
    moved, flops = rope.cost(shape)
    written = 2.0 * size(shape, "tokens") * size(shape, "kv_heads") * size(shape, "size") * size(shape, "element", 2)
    return moved + written, flops
