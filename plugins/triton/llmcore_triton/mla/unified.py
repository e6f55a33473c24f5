"""attn.mla.mixed and attn.mla.prefill, absorbed: rows of any number of query tokens in one launch.

With `deterministic` also attn.mla.decode, as in `attention.unified`: chunks of a fixed length are folded in order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from llmcore.api import OpContext

from llmcore_triton import tuned
from llmcore_triton.attention.listed import Config
from llmcore_triton.mla.latent import NARROW, WIDE, Latents, fitting, narrow, wide

KERNEL = "mla_unified"

CHUNK = 512
"""Tokens per chunk under `deterministic`."""


def make(context: OpContext) -> Latents:
    """Returns an AttentionKernel. `context.shape` is an AttnSpec."""
    config = vars(_default(context))
    # the buckets must agree bit for bit, so no bucket uses a measured configuration of its own
    return make_with(context, config if context.deterministic else tuned.choose(KERNEL, context, config))


def make_with(context: OpContext, config: Mapping[str, Any]) -> Latents:
    """The kernel with this Config, given as a mapping."""
    return Latents(context, Config(**config), decode=False, fixed=CHUNK if context.deterministic else None)


def candidates(context: OpContext) -> Iterator[dict[str, Any]]:
    """Configs worth timing. There are none if results must not depend on them."""
    if context.deterministic:
        return
    for block_m, block_n, warps, stages, per_processor in (
        *((WIDE, 32, 8, 3, 1), (WIDE, 64, 8, 3, 1), (WIDE, 32, 8, 5, 1)),
        *((NARROW, 32, 4, 5, 2), (NARROW, 32, 4, 3, 2), (NARROW, 64, 8, 3, 2)),
    ):
        shape = replace(narrow(context), block_m=block_m, block_n=block_n, warps=warps, stages=stages)
        yield from map(vars, fitting(context, [replace(shape, per_processor=per_processor)]))


def _default(context: OpContext) -> Config:
    if context.deterministic:
        # folding holds a second accumulator in registers
        return replace(narrow(context), warps=8)
    # few tokens are most often single ones, and a wide tile would be mostly empty
    return wide(context) if context.bucket > 1 else narrow(context)
