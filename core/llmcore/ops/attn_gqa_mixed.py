"""attn.gqa.mixed: attention of all rows of a captured step, decode and prefill rows and padding, in one launch.

Row borders are on the device. A row without query tokens is padding, and so are query tokens past the last border.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from llmcore.api.specs import OpContext
from llmcore.ops.attention import LAYOUTS, SHAPES, TOLERANCE, Sample, cost, rows
from llmcore.ops.attention import ReferenceAttention as make

__all__ = ["LAYOUTS", "SHAPES", "TOLERANCE", "cost", "long_samples", "make", "samples", "timed"]


def samples(context: OpContext) -> Iterator[Sample]:
    """Decode rows, chunks and padding rows in one step."""
    for n_query, kv_len in (
        ((1,), (33,)),
        ((1, 1, 5, 0), (70, 3, 5, 0)),
        ((1, 1, 4, 33, 0, 0), (1, 50, 90, 33, 0, 0)),
    ):
        yield rows(n_query, kv_len)


_FEW = (1, 17, 500, 4096, 33, 9001)
_MANY = tuple(range(40, 4040, 40))

_LONG: Mapping[int, tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]] = {
    0: (((1,), (32769,)),),
    1: (((1,) * 6 + (10, 0), (*_FEW, 4106, 0)),),
    2: (((1,) * 6 + (40, 0, 0), (*_FEW, 5000, 0, 0)),),
    3: (((1,) * 100 + (150, 6, 0), (*_MANY, 1500, 6, 0)),),
    4: (((1,) * 100 + (300, 112, 0, 0), (*_MANY, 4096, 112, 0, 0)), ((512,), (512,))),
}


def long_samples(context: OpContext) -> Iterator[Sample]:
    """Decode rows beside chunks and padding rows."""
    for n_query, kv_len in _LONG[context.bucket]:
        yield rows(n_query, kv_len)


def timed(context: OpContext, tokens: int) -> Iterator[Sample]:
    """Half of the tokens are decode rows, the others are one chunk of a prompt."""
    decode = tokens // 2
    chunk = tokens - decode
    yield rows([1] * decode + [chunk], [512] * decode + [512 + chunk])
