"""attn.gqa.mixed: rows of any number of query tokens in one launch; with `deterministic` also decode and prefill.

There each chunk of KV is computed by itself, at multiples of a fixed length, in tiles of fixed sizes, and chunks are
folded in order: a token's result has the same bits in a decode row, in a chunk of its prompt, and behind a prefix hit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from llmcore.api import OpContext
from llmcore.layers import spec_of

from llmcore_triton import tuned
from llmcore_triton.attention.grouped import Grouped
from llmcore_triton.attention.listed import Config, fitting, token_bytes

KERNEL = "unified"

CHUNK = 512
"""Tokens of a chunk under `deterministic`."""


def make(context: OpContext) -> Grouped:
    """An AttentionKernel; `context.shape` is an AttnSpec."""
    config = vars(_default(context))
    # what was measured in one bucket must not make its bits differ from another's
    return make_with(context, config if context.deterministic else tuned.choose(KERNEL, context, config))


def make_with(context: OpContext, config: Mapping[str, Any]) -> Grouped:
    """With this Config, as a mapping."""
    return Grouped(context, Config(**config), decode=False, fixed=CHUNK if context.deterministic else None)


def candidates(context: OpContext) -> Iterator[dict[str, Any]]:
    """Configs worth timing; none where results may not depend on them."""
    if context.deterministic:
        return
    for block_m, block_n, warps, stages in (
        (16, 64, 4, 3),
        (32, 64, 4, 3),
        (64, 64, 4, 2),
        (64, 64, 4, 3),
        (64, 128, 4, 2),
        (128, 64, 8, 3),
        (128, 128, 8, 2),
    ):
        if stages * block_n * token_bytes(context) <= 208 << 10:
            yield vars(Config(block_m=block_m, block_n=block_n, warps=warps, stages=stages))


def cost(context: OpContext) -> float | None:
    """Measured microseconds."""
    return tuned.microseconds(KERNEL, context)


def _default(context: OpContext) -> Config:
    wide = max(spec_of(context).key_size, spec_of(context).value_size) > 128
    config = fitting(context, Config(block_m=64, warps=8 if wide else 4))
    # exact f32 products have no tensor cores, and their operands are in registers
    return replace(config, block_m=16, block_n=min(config.block_n, 32)) if context.dtype == "f32" else config
