"""attn.gqa.decode: the KV of long rows split over programs, the query heads of a KV head together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from llmcore.api import OpContext

from llmcore_triton import tuned
from llmcore_triton.attention.grouped import Grouped
from llmcore_triton.attention.listed import BLOCKS, Config, fitting, token_bytes

KERNEL = "gqa_flashdecoding"


def make(context: OpContext) -> Grouped:
    """An AttentionKernel; `context.shape` is an AttnSpec."""
    return make_with(context, tuned.choose(KERNEL, context, vars(fitting(context, Config()))))


def make_with(context: OpContext, config: Mapping[str, Any]) -> Grouped:
    """With this Config, as a mapping."""
    return Grouped(context, Config(**config), decode=True)


def candidates(context: OpContext) -> Iterator[dict[str, Any]]:
    """Configs worth timing."""
    for block_n, warps, stages in BLOCKS:
        if stages * block_n * token_bytes(context) > 208 << 10:
            continue
        for per_processor in (2, 4):
            yield vars(Config(block_n=block_n, warps=warps, stages=stages, per_processor=per_processor))
    if context.bucket < 2:
        yield vars(fitting(context, Config(per_processor=4, least=64)))
        yield vars(fitting(context, Config(per_processor=2, least=256)))


def cost(context: OpContext) -> float | None:
    """Measured microseconds."""
    return tuned.microseconds(KERNEL, context)
