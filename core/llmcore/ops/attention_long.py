"""Attention cases of real sizes, for compiled kernels on a device: contexts up to 128k, chunks over long prefixes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch

from llmcore.api.specs import OpContext
from llmcore.ops import size
from llmcore.ops.attention_cases import AttnCase, case, with_spec

Rows = tuple[Sequence[int], Sequence[int]]
"""(n_query, kv_len) of a case."""

SHARP = 4.0
"""The standard deviation of the scores: with it, a few of 128k keys decide the result."""

MOST_BYTES = 1200 * 2**20
"""Most bytes of a case's KV in f32. Larger cases are left out, so that several processes can run at the same time."""


def decode_cases(context: OpContext) -> Iterator[AttnCase]:
    """Rows of one query token: one row and many, KV of 4k, 32k and 128k tokens, long rows beside short ones."""
    skewed = (1, 17, 500, 4096, 33, 9001, 2, 64)
    wide = tuple(int(n) for n in np.random.default_rng(len(context.dtype)).integers(1, 700, 300))
    lengths: dict[int, tuple[Sequence[int], ...]] = {
        0: ((4097,), (32768,), (131072,)),
        1: (skewed, (8192,) * 3, (1, 32769)),
        2: ((*skewed, *range(100, 1700, 100)),),
        3: (wide[:100], (2000,) * 66),
        4: (wide,),
    }
    for kv_len in lengths[context.bucket]:
        yield from _made(context, [((1,) * len(kv_len), kv_len)])


def prefill_cases(context: OpContext) -> Iterator[AttnCase]:
    """Whole prompts, and chunks over prefixes of 4k and 32k tokens, short rows beside long ones."""
    rows: dict[int, tuple[Rows, ...]] = {
        0: (((1,), (32769,)),),
        1: (((3, 13), (4099, 700)),),
        2: (((60,), (32768,)), ((1, 40, 20), (129, 40, 5000))),
        3: (((100, 28, 128), (8192, 28, 2000)),),
        4: (((512,), (32768,)), ((4096,), (4096,)), ((1000, 31, 700, 1), (1000, 4127, 1500, 9000))),
    }
    yield from _made(context, rows[context.bucket])


def mixed_cases(context: OpContext) -> Iterator[AttnCase]:
    """Decode rows beside chunks and padding rows."""
    few = (1, 17, 500, 4096, 33, 9001)
    many = tuple(range(40, 4040, 40))
    rows: dict[int, tuple[Rows, ...]] = {
        0: (((1,), (32769,)),),
        1: (((1,) * 6 + (10, 0), (*few, 4106, 0)),),
        2: (((1,) * 6 + (40, 0, 0), (*few, 5000, 0, 0)),),
        3: (((1,) * 100 + (150, 6, 0), (*many, 1500, 6, 0)),),
        4: (((1,) * 100 + (300, 112, 0, 0), (*many, 4096, 112, 0, 0)), ((512,), (512,))),
    }
    yield from _made(context, rows[context.bucket])


def _made(context: OpContext, rows: Sequence[Rows]) -> Iterator[AttnCase]:
    context = with_spec(context)
    width = size(context.shape, "kv_heads") * (size(context.shape, "key_size") + size(context.shape, "value_size"))
    for n_query, kv_len in rows:
        if 4 * width * sum(kv_len) <= MOST_BYTES:
            yield _joined(case(context, n_query, kv_len, sharpness=SHARP))


def _joined(made: AttnCase) -> AttnCase:
    """The case with queries, keys and values as parts of the rows of one tensor, as a projection returns them."""
    if made.v_new is None:
        return made
    parts = (made.q, made.k_new, made.v_new)
    row = torch.cat([part.flatten(1) for part in parts], 1)
    views, start = [], 0
    for part in parts:
        width = part.shape[1] * part.shape[2]
        views.append(row[:, start : start + width].view(part.shape))
        start += width
    return replace(made, q=views[0], k_new=views[1], v_new=views[2])
