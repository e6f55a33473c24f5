"""latent_rope_kv_write, a composite for latent attention: the norm of the latent, rope on queries and the shared key,
and the write of a token's row to the KV pool.

It expands to `rms_norm`, `rope` and the layout's own write, which the layer passes as the part `kv_write`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from llmcore.api import OpContext
from llmcore.ops import ROUNDING, Op, Shape, draw, rms_norm, rope, size

TOLERANCE = ROUNDING

IN_PLACE = ("q", "row")

LAYOUTS = ("mla-latent",)

SHAPES: tuple[Shape, ...] = (
    {"heads": 3, "size": 24, "latent": 32, "rotated": 8},
    {"heads": 16, "size": 16, "latent": 40, "rotated": 16},
)
"""`size` is the size of a query head; rope rotates its last `rotated` elements."""


def reference(
    q: torch.Tensor,
    row: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    cos: torch.Tensor,
    sin: torch.Tensor,
    kv: tuple[torch.Tensor, ...],
    slots: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """q [T, heads, size], row [T, latent + rotated], weight [latent], cos and sin [T, rotated] f32 -> (q, row).

    The last `rotated` elements of each head of q are rotated. The row is the normed latent and the rotated key, as
    the layout's `gather` gives it back. Also writes kv (layout mla-latent: one pool [slots, 1, latent + rotated]) at
    `slots` [T]. q and row may be views with other elements between their rows.
    """
    norm, rotate = rms_norm.reference, rope.reference
    return _run(q, row, weight, eps, cos, sin, kv, slots, norm=norm, rotate=rotate, write=_write)


def _write(kv: tuple[torch.Tensor, ...], slots: torch.Tensor, row: torch.Tensor, values: None) -> None:
    kv[0].index_copy_(0, slots, row)


def _run(
    q: torch.Tensor,
    row: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    cos: torch.Tensor,
    sin: torch.Tensor,
    kv: tuple[torch.Tensor, ...],
    slots: torch.Tensor,
    *,
    norm: Op,
    rotate: Op,
    write: Op,
) -> tuple[torch.Tensor, torch.Tensor]:
    rotated, latent = cos.shape[-1], weight.shape[0]
    turned = rotate(torch.cat((q[..., -rotated:], row[:, None, latent:]), 1), cos, sin)
    joined = torch.cat((norm(row[:, :latent], weight, eps), turned[:, -1]), -1)
    write(kv, slots, joined.unsqueeze(1), None)
    return torch.cat((q[..., :-rotated], turned[:, :-1]), -1), joined


def expand(context: OpContext, part: Callable[..., Op]) -> Op:
    """rms_norm, one rope over the query heads and the key, and the layout's write."""
    shape = context.shape
    rotated = size(shape, "rotated")
    norm = part("rms_norm", size=shape["latent"])
    rotate = part("rope", heads=size(shape, "heads") + 1, size=rotated, rotated=rotated)
    write = part("kv_write")

    return partial(_run, norm=norm, rotate=rotate, write=write)


def samples(context: OpContext) -> Iterator[tuple[Any, ...]]:
    """Queries and rows as parts of wider tensors, with scattered slots in a pool full of NaN."""
    heads, width, latent = (size(context.shape, name, default) for name, default in _DEFAULTS)
    rotated = size(context.shape, "rotated", 8)
    for x, cos, sin in rope.samples(_rope_context(context, rotated)):
        if cos.shape[-1] != rotated:
            continue
        tokens = len(x)
        joined = draw(context, tokens, heads * width + latent + rotated, seed=1)
        q = joined[:, : heads * width].view(tokens, heads, width)
        slots = torch.randperm(2 * tokens + 1, generator=torch.Generator().manual_seed(2))[:tokens]
        pool = torch.full((2 * tokens + 1, 1, latent + rotated), torch.nan, dtype=x.dtype, device=x.device)
        weight = draw(context, latent, seed=3)
        yield q, joined[:, heads * width :], weight, 1e-6, cos, sin, (pool,), slots.to(x.device)


_DEFAULTS = (("heads", 3), ("size", 24), ("latent", 32))


def _rope_context(context: OpContext, rotated: int) -> OpContext:
    """The context of a rope that rotates whole heads of `rotated` elements."""
    return replace(context, shape={"heads": 1, "size": rotated, "rotated": rotated})


def cost(shape: Shape) -> tuple[float, float]:
    """(bytes, flops): the rotated part of queries and the row are read and written."""
    tokens, rotated = size(shape, "tokens"), size(shape, "rotated")
    elements = tokens * (size(shape, "heads") * rotated + size(shape, "latent") + rotated)
    return 2.0 * elements * size(shape, "element", 2), 6.0 * elements
