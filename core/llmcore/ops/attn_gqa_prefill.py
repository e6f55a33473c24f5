"""attn.gqa.prefill: attention of rows with any number of query tokens, over KV read through the table of granules."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from llmcore.api.specs import OpContext
from llmcore.ops.attention import LAYOUTS, SHAPES, TOLERANCE, Sample, cost, rows
from llmcore.ops.attention import ReferenceAttention as make

__all__ = ["LAYOUTS", "SHAPES", "TOLERANCE", "cost", "long_samples", "make", "samples", "timed"]


def samples(context: OpContext) -> Iterator[Sample]:
    """Whole prompts, chunks over a prefix, single tokens, and all of these in one step."""
    for n_query, kv_len in (((5,), (5,)), ((7,), (40,)), ((1,), (9,)), ((1, 4, 33, 2), (1, 50, 33, 130))):
        yield rows(n_query, kv_len)


_LONG: Mapping[int, tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]] = {
    0: (((1,), (32769,)),),
    1: (((3, 13), (4099, 700)),),
    2: (((60,), (32768,)), ((1, 40, 20), (129, 40, 5000))),
    3: (((100, 28, 128), (8192, 28, 2000)),),
    4: (((512,), (32768,)), ((4096,), (4096,)), ((1000, 31, 700, 1), (1000, 4127, 1500, 9000))),
}


def long_samples(context: OpContext) -> Iterator[Sample]:
    """Whole prompts, and chunks over prefixes of 4k and 32k tokens, short rows beside long ones."""
    for n_query, kv_len in _LONG[context.bucket]:
        yield rows(n_query, kv_len)


def timed(context: OpContext, tokens: int) -> Iterator[Sample]:
    """One whole prompt, and a chunk of the same length over a prefix."""
    for prefix in (0, 512):
        yield rows([tokens], [prefix + tokens])
