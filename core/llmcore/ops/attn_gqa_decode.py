"""attn.gqa.decode: attention of rows with one query token each, over KV read through the table of granules."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from llmcore.api.specs import OpContext
from llmcore.ops.attention import LAYOUTS, SHAPES, TOLERANCE, Sample, cost, rows
from llmcore.ops.attention import ReferenceAttention as make

__all__ = ["LAYOUTS", "SHAPES", "TOLERANCE", "cost", "long_samples", "make", "samples", "timed"]


def samples(context: OpContext) -> Iterator[Sample]:
    """KV of one token, around a granule, and long rows beside short ones."""
    for kv_len in ((1,), (37,), (1, 16, 17, 200), range(3, 18)):
        yield rows([1] * len(kv_len), kv_len)


_SKEWED = (1, 17, 500, 4096, 33, 9001, 2, 64)
_WIDE = np.random.default_rng(0).integers(1, 700, 300).tolist()

_LONG: Mapping[int, tuple[Sequence[int], ...]] = {
    0: ((4097,), (32768,), (131072,)),
    1: (_SKEWED, (8192,) * 3, (1, 32769)),
    2: ((*_SKEWED, *range(100, 1700, 100)),),
    3: (_WIDE[:100], (2000,) * 66),
    4: (_WIDE,),
}


def long_samples(context: OpContext) -> Iterator[Sample]:
    """One row and many, KV of 4k, 32k and 128k tokens, long rows beside short ones."""
    for kv_len in _LONG[context.bucket]:
        yield rows([1] * len(kv_len), kv_len)


def timed(context: OpContext, tokens: int) -> Iterator[Sample]:
    """Rows of the same KV length; only few rows have a long one too."""
    for kv_len in (512, 8192) if tokens <= 16 else (512,):
        yield rows([1] * tokens, [kv_len] * tokens)
