"""attn.gqa.mixed: rows of any number of query tokens in one launch; with `deterministic` also decode and prefill.

With `deterministic` each chunk of KV is computed by itself, at multiples of a fixed length, in tiles of fixed sizes.
Chunks are folded in order. So a token's result has the same bits in a decode row, in a chunk of its prompt, and behind
a prefix hit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from llmcore.api import OpContext

from llmcore_triton import tuned
from llmcore_triton.attention.codes import half
from llmcore_triton.attention.grouped import Grouped
from llmcore_triton.attention.listed import Config, kind_of, timed, usual, wide

KERNEL = "unified"

CHUNK = 512
"""Tokens per chunk under `deterministic`."""

LEAST = 512
"""The least tokens of a chunk. Shorter chunks save less than it costs to merge tiles of several query tokens. A prompt
of 512 tokens (heads as in Llama-3.1-8B, one H200) takes 24 us in chunks of 128, and 17 us whole."""


def make(context: OpContext) -> Grouped:
    """Returns an AttentionKernel. `context.shape` is an AttnSpec."""
    config = vars(_default(context))
    # the buckets must agree bit for bit, so no bucket uses a measured configuration of its own
    chosen = config if context.deterministic else tuned.choose(KERNEL, context, config)
    return make_with(context, {**chosen, "least": max(chosen["least"], LEAST)})


def make_with(context: OpContext, config: Mapping[str, Any]) -> Grouped:
    """The kernel with this Config, given as a mapping."""
    return Grouped(context, Config(**config), decode=False, fixed=CHUNK if context.deterministic else None)


def candidates(context: OpContext) -> Iterator[dict[str, Any]]:
    """Configs worth timing. There are none if results must not depend on them."""
    if context.deterministic:
        return
    for block_m, warps, stages in ((16, 4, 5), (32, 4, 5), (64, 4, 3), (64, 4, 5), (128, 8, 3), (128, 8, 5)):
        for config in timed(context, ((64, warps, stages), (128, warps, stages))):
            yield vars(replace(config, block_m=block_m))


_CODES: Mapping[str, Mapping[str, int]] = {
    "usual": {"block_m": 16, "block_n": 32, "warps": 1, "stages": 3, "per_processor": 8},
    "by element": {"block_m": 16, "block_n": 128, "stages": 3, "registers": 168},
    "wide": {"block_m": 16, "block_n": 64, "stages": 3, "per_processor": 2},
}
"""Changes of the Config over codes whose products are of f16. Most rows of a mixed step decode. In a tile of 64 a row
takes twice the instructions and all registers. Chosen by counting, not measured."""


def _default(context: OpContext) -> Config:
    if half(context):
        return usual(context, **_CODES[kind_of(context)])
    # folding holds a second accumulator in registers, so steps are smaller, and more of them are in flight
    block_n, stages = (32, 5) if context.deterministic else (64, 3)
    return usual(context, block_m=64, block_n=block_n, stages=stages, warps=8 if wide(context) else 4)
