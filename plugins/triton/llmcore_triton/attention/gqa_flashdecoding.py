"""attn.gqa.decode: splits the KV of long rows over programs, each with all query heads of a KV head."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from llmcore.api import OpContext

from llmcore_triton import tuned
from llmcore_triton.attention.grouped import Grouped
from llmcore_triton.attention.listed import BLOCKS, Config, decoding, timed, timed_over_codes
from llmcore_triton.specs.layouts import QUANTIZED

KERNEL = "gqa_flashdecoding"


def make(context: OpContext) -> Grouped:
    """Returns an AttentionKernel. `context.shape` is an AttnSpec."""
    return make_with(context, tuned.choose(KERNEL, context, vars(decoding(context))))


def make_with(context: OpContext, config: Mapping[str, Any]) -> Grouped:
    """The kernel with this Config, given as a mapping."""
    return Grouped(context, Config(**config), decode=True)


def candidates(context: OpContext) -> Iterator[dict[str, Any]]:
    """Configs worth timing."""
    yield from map(vars, timed_over_codes(context))
    for config in timed(context, BLOCKS):
        for per_processor in (2, 4):
            yield vars(replace(config, per_processor=per_processor))
    if context.bucket < 2:
        base = decoding(context)
        for least in (64, 256):
            yield vars(replace(base, least=least))
        if context.layout in QUANTIZED:
            return
        for block_n, least in ((64, 64), (64, 128), (32, 32), (32, 64)):
            for early in (False, True):
                yield vars(replace(base, block_n=block_n, least=least, early=early))
        for block_n, warps in ((32, 2), (32, 1), (16, 1)):
            yield vars(replace(base, block_n=block_n, warps=warps, stages=3, least=block_n, early=True))
