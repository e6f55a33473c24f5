"""head_linear, kernel cublas: torch's own batched product, for many tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from llmcore.api import OpContext
from llmcore.layers import Op

from llmcore_triton import tuned
from llmcore_triton.linear_cublas import GAP

KERNEL = "cublas"


def run(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [T, heads, inputs], weight [heads, outputs, inputs] of any strides -> [T, heads, outputs], contiguous."""
    out = x.new_empty(len(x), *weight.shape[:2])
    torch.bmm(x.transpose(0, 1), weight.transpose(1, 2), out=out.transpose(0, 1))
    return out


def make(context: OpContext) -> Op:
    """One function serves every shape."""
    return run


def make_with(context: OpContext, config: Mapping[str, Any]) -> Op:
    """The same: torch chooses by itself."""
    return run


def candidates(context: OpContext) -> Iterator[dict[str, Any]]:
    """The one there is."""
    yield {}


def cost(context: OpContext) -> float | None:
    """Measured microseconds, and those that only its neighbours feel."""
    measured = tuned.microseconds(KERNEL, context)
    return measured if measured is None else measured + GAP
