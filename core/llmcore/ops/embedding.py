"""embedding: rows of a table."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from llmcore.api.specs import OpContext
from llmcore.ops import SAMPLE_TOKENS, Shape, draw, size

TOLERANCE = {"f32": 0.0, "f16": 0.0, "bf16": 0.0}

SHAPES: tuple[Shape, ...] = ({"vocab": 97, "size": 40},)


def reference(ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """ids [T] int64, table [vocabulary, size] -> [T, size]."""
    return F.embedding(ids, table)


def samples(context: OpContext) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Both ends of the vocabulary, repeated ids, and NaN in rows that no id names."""
    rows, width = size(context.shape, "vocab", 97), size(context.shape, "size", 40)
    for tokens in SAMPLE_TOKENS[context.bucket]:
        table = draw(context, rows, width)
        ids = torch.arange(tokens) % 3 * (rows - 1) // 2
        unused = torch.ones(rows, dtype=torch.bool)
        unused[ids] = False
        table[unused] = torch.nan
        yield ids, table


def cost(shape: Shape) -> tuple[float, float]:
    """Each row is read and written."""
    return 2.0 * size(shape, "tokens") * size(shape, "size") * size(shape, "element", 2), 0.0
