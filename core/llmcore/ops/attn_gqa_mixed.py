"""attn.gqa.mixed: attention of all rows of a captured step, decode and prefill rows and padding, in one launch.

Row borders are on the device. A row without query tokens is padding, and so are query tokens past the last border.
"""

from __future__ import annotations

from collections.abc import Iterator

from llmcore.api.protocols import AttentionKernel
from llmcore.api.specs import OpContext
from llmcore.ops import attention_cases
from llmcore.ops.attention import LAYOUTS, TOLERANCE, ReferenceAttention, cost
from llmcore.ops.attention_cases import SHAPES, AttnCase, reference
from llmcore.ops.attention_cases import mixed_timed as timed

__all__ = ["LAYOUTS", "SHAPES", "TOLERANCE", "cost", "long_samples", "make", "reference", "samples", "timed"]


def make(context: OpContext) -> AttentionKernel:
    """The reference; `context.shape` is an AttnSpec."""
    return ReferenceAttention(context)


def samples(context: OpContext) -> Iterator[tuple[AttnCase]]:
    """Prompts, chunks and single tokens beside padding."""
    for case in attention_cases.mixed_cases(attention_cases.with_spec(context)):
        yield (case,)


def long_samples(context: OpContext) -> Iterator[tuple[AttnCase]]:
    """Contexts of real lengths."""
    for case in attention_cases.long_mixed_cases(context):
        yield (attention_cases.projected(case),)
