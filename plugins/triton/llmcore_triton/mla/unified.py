"""attn.mla.mixed and attn.mla.prefill, absorbed: rows of any number of query tokens in one launch; with
`deterministic` also attn.mla.decode, as `attention.unified` does it: chunks of a fixed length, folded in order."""

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
"""Tokens of a chunk under `deterministic`."""


def make(context: OpContext) -> Latents:
    """An AttentionKernel; `context.shape` is an AttnSpec."""
    config = vars(_default(context))
    # what was measured in one bucket must not make its bits differ from another's
    return make_with(context, config if context.deterministic else tuned.choose(KERNEL, context, config))


def make_with(context: OpContext, config: Mapping[str, Any]) -> Latents:
    """With this Config, as a mapping."""
    return Latents(context, Config(**config), decode=False, fixed=CHUNK if context.deterministic else None)


def candidates(context: OpContext) -> Iterator[dict[str, Any]]:
    """Configs worth timing; none where results may not depend on them."""
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
    # few tokens are most often single ones: a wide tile would be empty for the most part
    return wide(context) if context.bucket > 1 else narrow(context)
