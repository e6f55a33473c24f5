"""Shared by the attn.mla ops: multi-head latent attention in its absorbed form (arXiv:2405.04434, section 2.1).

A token's KV is one row: the normed latent of `value_size` elements, then the rotated part of its key. Queries are
absorbed: they are already multiplied by the keys' up-projection. So every query head attends to the same row (one KV
head), and the row's latent is the value. The caller applies the values' up-projection afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from llmcore.api import AttnSpec, OpContext
from llmcore.ops import Shape, size
from llmcore.ops.attention import ReferenceAttention, shape_of
from llmcore.ops.attention_cases import AttnCase

LAYOUTS = ("mla-latent",)

SHAPES: tuple[Shape, ...] = tuple(
    shape_of(spec)
    for spec in (
        AttnSpec(heads=6, kv_heads=1, key_size=24, value_size=16, scale=0.2),
        AttnSpec(heads=16, kv_heads=1, key_size=48, value_size=32, scale=0.15),
        AttnSpec(heads=3, kv_heads=1, key_size=40, value_size=32, scale=0.3),
    )
)
"""Few heads, and a whole tile of heads; rotated parts of 8 and 16 elements."""


class LatentAttention(ReferenceAttention):
    """The reference over latent rows."""

    layouts = LAYOUTS


def with_spec(context: OpContext) -> OpContext:
    """`context` with the layout `mla-latent`, and with a small AttnSpec if it has no shape."""
    return replace(context, layout=context.layout or LAYOUTS[0], shape=context.shape or SHAPES[0])


def cost(shape: Shape) -> tuple[float, float]:
    """(bytes, flops): the rows of `kv_len` tokens are read once for `tokens` queries."""
    kv_len, tokens, heads = size(shape, "kv_len"), size(shape, "tokens"), size(shape, "heads")
    key, value = size(shape, "key_size"), size(shape, "value_size")
    moved = kv_len * key + tokens * heads * (key + value)
    return float(moved * size(shape, "element", 2)), 2.0 * tokens * kv_len * heads * (key + value)


def apart(case: AttnCase) -> AttnCase:
    """The case with its queries as a view of a wider tensor, so that other elements lie between them."""
    wide = case.q.new_full((*case.q.shape[:2], case.q.shape[2] + 8), float("nan"))
    wide[..., : case.q.shape[2]] = case.q
    return replace(case, q=wide[..., : case.q.shape[2]])


def cases(cases: Iterator[AttnCase]) -> Iterator[tuple[AttnCase]]:
    """The cases as samples, and the last one again with queries from `apart`."""
    case = None
    for case in cases:
        yield (case.joined(),)
    if case is not None:
        yield (apart(case.joined()),)
