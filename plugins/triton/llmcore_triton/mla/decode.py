"""attn.mla.decode: splits the latent rows of long requests over programs. A tile has all query heads of a token."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from llmcore.api import OpContext
from llmcore.layers import spec_of

from llmcore_triton import tuned
from llmcore_triton.attention.listed import Config
from llmcore_triton.mla.latent import NARROW, WIDE, Latents, fitting, narrow, wide

KERNEL = "mla_flashdecoding"


def make(context: OpContext) -> Latents:
    """Returns an AttentionKernel. `context.shape` is an AttnSpec."""
    return make_with(context, tuned.choose(KERNEL, context, vars(_default(context))))


def make_with(context: OpContext, config: Mapping[str, Any]) -> Latents:
    """The kernel with this Config, given as a mapping."""
    return Latents(context, Config(**config), decode=True)


def candidates(context: OpContext) -> Iterator[dict[str, Any]]:
    """Configs worth timing."""
    base = _default(context)
    for block_n, warps, stages, per_processor in (
        *((32, 4, 5, 2), (32, 4, 3, 2), (16, 4, 5, 2), (16, 4, 7, 2), (64, 8, 3, 2)),
        *((32, 8, 5, 2), (32, 8, 7, 1), (64, 8, 5, 1)),
    ):
        shape = replace(base, block_m=NARROW, block_n=block_n, warps=warps, stages=stages, per_processor=per_processor)
        yield from map(vars, fitting(context, [shape]))
    if context.bucket < 2:
        for least in (32, 128):
            yield vars(replace(base, least=least))
    if spec_of(context).heads > NARROW:
        for block_n, stages in ((32, 3), (64, 3), (32, 5)):
            shape = replace(base, block_m=WIDE, block_n=block_n, warps=8, stages=stages, per_processor=1)
            yield from map(vars, fitting(context, [shape]))


def _default(context: OpContext) -> Config:
    # a token's row is read again for each tile of its heads, mostly from the L2 cache
    return wide(context) if spec_of(context).heads > 2 * NARROW else narrow(context)
