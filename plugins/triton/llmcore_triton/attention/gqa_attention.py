"""attn.gqa.decode: one program for each row and KV head, with all its query heads. It needs no plan and no merge."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from llmcore.api import OpContext

from llmcore_triton import tuned
from llmcore_triton.attention.grouped import Whole
from llmcore_triton.attention.listed import BLOCKS, Config, decoding, timed

KERNEL = "gqa_attention"


def make(context: OpContext) -> Whole:
    """Returns an AttentionKernel. `context.shape` is an AttnSpec."""
    return make_with(context, tuned.choose(KERNEL, context, vars(decoding(context))))


def make_with(context: OpContext, config: Mapping[str, Any]) -> Whole:
    """The kernel with this Config, given as a mapping."""
    return Whole(context, Config(**config))


def candidates(context: OpContext) -> Iterator[dict[str, Any]]:
    """Configs worth timing."""
    yield from map(vars, timed(context, BLOCKS))
