"""attn.gqa.decode: one program per row and KV head, the head's query heads together; nothing to plan or to merge."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from llmcore.api import OpContext

from llmcore_triton import tuned
from llmcore_triton.attention.grouped import Whole
from llmcore_triton.attention.listed import BLOCKS, Config, timed, usual

KERNEL = "gqa_attention"


def make(context: OpContext) -> Whole:
    """An AttentionKernel; `context.shape` is an AttnSpec."""
    return make_with(context, tuned.choose(KERNEL, context, vars(usual(context))))


def make_with(context: OpContext, config: Mapping[str, Any]) -> Whole:
    """With this Config, as a mapping."""
    return Whole(context, Config(**config))


def candidates(context: OpContext) -> Iterator[dict[str, Any]]:
    """Configs worth timing."""
    yield from map(vars, timed(context, BLOCKS))
