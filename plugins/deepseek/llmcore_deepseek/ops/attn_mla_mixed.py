"""attn.mla.mixed: latent attention of all rows of a captured step, absorbed; see llmcore_deepseek.ops.mla."""

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
    """Prompts, chunks and single tokens beside padding."""
    yield from mla.cases(attention_cases.mixed_cases(mla.with_spec(context)))


def long_samples(context: OpContext) -> Iterator[tuple[AttnCase]]:
    """Contexts of real lengths."""
    for case in attention_cases.long_mixed_cases(mla.with_spec(context)):
        yield (case.joined(),)


def timed(context: OpContext, tokens: int) -> Iterator[tuple[AttnCase]]:
    """The rows that attn.gqa.mixed times."""
    for (case,) in attention_cases.mixed_timed(mla.with_spec(context), tokens):
        yield (case.joined(),)
