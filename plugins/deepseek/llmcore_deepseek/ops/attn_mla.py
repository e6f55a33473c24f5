"""attn.mla.decode, attn.mla.prefill, attn.mla.mixed: latent attention in its absorbed form (arXiv:2405.04434, 2.1).

A token's KV is one row: the normed latent of `value_size` elements, then the rotated part of its key. Queries are
absorbed: they are already multiplied by the keys' up-projection. So every query head attends to the same row (one KV
head), and the row's latent is the value. The caller applies the values' up-projection afterwards.

For long prompts the expanded form is cheaper (attn.varlen over keys and values of every head). The layer chooses.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import ModuleType

from llmcore.api import AttnSpec, OpContext
from llmcore.ops import Shape, attn_gqa_decode, attn_gqa_mixed, attn_gqa_prefill, size
from llmcore.ops.attention import TOLERANCE, Sample, shape_of
from llmcore.ops.attention import ReferenceAttention as make

__all__ = ["JOINED", "LAYOUTS", "SHAPES", "TOLERANCE", "cost", "long_samples", "make", "samples", "timed"]

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


JOINED = True

_GQA: Mapping[str, ModuleType] = {
    "attn.mla.decode": attn_gqa_decode,
    "attn.mla.prefill": attn_gqa_prefill,
    "attn.mla.mixed": attn_gqa_mixed,
}
"""Op -> the op of core with the same kind of rows."""


def samples(context: OpContext) -> Iterator[Sample]:
    """The rows of the attn.gqa op."""
    yield from _GQA[context.op].samples(context)


def long_samples(context: OpContext) -> Iterator[Sample]:
    """The rows of the attn.gqa op, of real lengths."""
    yield from _GQA[context.op].long_samples(context)


def timed(context: OpContext, tokens: int) -> Iterator[Sample]:
    """The rows that the attn.gqa op times."""
    yield from _GQA[context.op].timed(context, tokens)


def cost(shape: Shape) -> tuple[float, float]:
    """(bytes, flops): the rows of `kv_len` tokens are read once for `tokens` queries."""
    kv_len, tokens, heads = size(shape, "kv_len"), size(shape, "tokens"), size(shape, "heads")
    key, value = size(shape, "key_size"), size(shape, "value_size")
    moved = kv_len * key + tokens * heads * (key + value)
    return float(moved * size(shape, "element", 2)), 2.0 * tokens * kv_len * heads * (key + value)
