"""attn.mla.decode: latent attention of rows with one query token each, absorbed; see llmcore_deepseek.ops.mla."""

from __future__ import annotations

from collections.abc import Iterator

from llmcore.api import AttentionKernel, OpContext
from llmcore.ops import attention_cases
from llmcore.ops.attention import TOLERANCE
from llmcore.ops.attention_cases import AttnCase, reference

from llmcore_deepseek.ops import mla
from llmcore_deepseek.ops.mla import LAYOUTS, SHAPES, LatentAttention, cost

__all__ = ["LAYOUTS", "SHAPES", "TOLERANCE", "cost", "long_samples", "make", "reference", "samples", "timed"]


def make(context: OpContext) -> AttentionKernel:
    """The reference; `context.shape` is an AttnSpec."""
    return LatentAttention(context)


def samples(context: OpContext) -> Iterator[tuple[AttnCase]]:
    """Steps of one row and of many."""
    yield from mla.cases(attention_cases.decode_cases(mla.with_spec(context)))


def long_samples(context: OpContext) -> Iterator[tuple[AttnCase]]:
    """Contexts of real lengths."""
    for case in attention_cases.long_decode_cases(mla.with_spec(context)):
        yield (case.joined(),)


def timed(context: OpContext, tokens: int) -> Iterator[tuple[AttnCase]]:
    """The rows that attn.gqa.decode times."""
    for (case,) in attention_cases.decode_timed(mla.with_spec(context), tokens):
        yield (case.joined(),)
