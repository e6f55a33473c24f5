"""attn.gqa.prefill: attention of rows with any number of query tokens, over KV read through the table of granules."""

from __future__ import annotations

from collections.abc import Iterator

from llmcore.api.protocols import AttentionKernel
from llmcore.api.specs import OpContext
from llmcore.ops import attention_cases
from llmcore.ops.attention import LAYOUTS, TOLERANCE, ReferenceAttention, cost
from llmcore.ops.attention_cases import SHAPES, AttnCase, reference
from llmcore.ops.attention_cases import prefill_timed as timed

__all__ = ["LAYOUTS", "SHAPES", "TOLERANCE", "cost", "long_samples", "make", "reference", "samples", "timed"]


def make(context: OpContext) -> AttentionKernel:
    """The reference; `context.shape` is an AttnSpec."""
    return ReferenceAttention(context)


def samples(context: OpContext) -> Iterator[tuple[AttnCase]]:
    """Prompts, chunks and single tokens."""
    for case in attention_cases.prefill_cases(attention_cases.with_spec(context)):
        yield (case,)


def long_samples(context: OpContext) -> Iterator[tuple[AttnCase]]:
    """Contexts of real lengths."""
    for case in attention_cases.long_prefill_cases(context):
        yield (attention_cases.projected(case),)
