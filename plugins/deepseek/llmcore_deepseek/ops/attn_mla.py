"""attn.mla.decode, attn.mla.prefill, attn.mla.mixed: latent attention in its absorbed form (arXiv:2405.04434, 2.1).

A token's KV is one row: the normed latent of `value_size` elements, then the rotated part of its key. Queries are
absorbed: they are already multiplied by the keys' up-projection. So every query head attends to the same row (one KV
head), and the row's latent is the value. The caller applies the values' up-projection afterwards.

For long prompts the expanded form is cheaper (attn.varlen over keys and values of every head). The layer chooses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

from llmcore.api import AttentionKernel, AttnSpec, OpContext
from llmcore.ops import Shape, attention_cases, size
from llmcore.ops.attention import TOLERANCE, ReferenceAttention, shape_of
from llmcore.ops.attention_cases import AttnCase, reference

__all__ = ["LAYOUTS", "SHAPES", "TOLERANCE", "cost", "long_samples", "make", "reference", "samples", "timed"]

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


class _Cases(NamedTuple):
    """The cases of the attn.gqa op with the same kind of rows."""

    short: Callable[[OpContext], Iterator[AttnCase]]
    long: Callable[[OpContext], Iterator[AttnCase]]
    timed: Callable[[OpContext, int], Iterator[tuple[AttnCase]]]


_CASES: Mapping[str, _Cases] = {
    "attn.mla.decode": _Cases(
        attention_cases.decode_cases, attention_cases.long_decode_cases, attention_cases.decode_timed
    ),
    "attn.mla.prefill": _Cases(
        attention_cases.prefill_cases, attention_cases.long_prefill_cases, attention_cases.prefill_timed
    ),
    "attn.mla.mixed": _Cases(
        attention_cases.mixed_cases, attention_cases.long_mixed_cases, attention_cases.mixed_timed
    ),
}


class LatentAttention(ReferenceAttention):
    """The reference over latent rows."""

    layouts = LAYOUTS


def make(context: OpContext) -> AttentionKernel:
    """The reference; `context.shape` is an AttnSpec."""
    return LatentAttention(context)


def samples(context: OpContext) -> Iterator[tuple[AttnCase]]:
    """Rows of every length, and the last case again with queries from `apart`."""
    cases = [case.joined() for case in _CASES[context.op].short(_with_spec(context))]
    for case in (*cases, apart(cases[-1])):
        yield (case,)


def long_samples(context: OpContext) -> Iterator[tuple[AttnCase]]:
    """Contexts of real lengths."""
    for case in _CASES[context.op].long(_with_spec(context)):
        yield (case.joined(),)


def timed(context: OpContext, tokens: int) -> Iterator[tuple[AttnCase]]:
    """The rows that the attn.gqa op times."""
    for (case,) in _CASES[context.op].timed(_with_spec(context), tokens):
        yield (case.joined(),)


def apart(case: AttnCase) -> AttnCase:
    """The case with its queries as a view of a wider tensor, so that other elements lie between them."""
    wide = case.q.new_full((*case.q.shape[:2], case.q.shape[2] + 8), float("nan"))
    wide[..., : case.q.shape[2]] = case.q
    return replace(case, q=wide[..., : case.q.shape[2]])


def cost(shape: Shape) -> tuple[float, float]:
    """(bytes, flops): the rows of `kv_len` tokens are read once for `tokens` queries."""
    kv_len, tokens, heads = size(shape, "kv_len"), size(shape, "tokens"), size(shape, "heads")
    key, value = size(shape, "key_size"), size(shape, "value_size")
    moved = kv_len * key + tokens * heads * (key + value)
    return float(moved * size(shape, "element", 2)), 2.0 * tokens * kv_len * heads * (key + value)


def _with_spec(context: OpContext) -> OpContext:
    """`context` with the layout `mla-latent`, and with a small AttnSpec if it has no shape."""
    return replace(context, layout=context.layout or LAYOUTS[0], shape=context.shape or SHAPES[0])
