"""linear, kernel cublas: torch's own, so that what was measured decides between it and ours."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from llmcore.api import OpContext

from llmcore_triton import tuned

KERNEL = "cublas"

GAP = 0.7
"""Microseconds that a kernel after this one starts late: none overlaps with cuBLAS, ours overlap with each other."""

Linear = Callable[..., torch.Tensor]


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """x [T, inputs], weight [outputs, inputs] -> [T, outputs], over `residual` where there is one."""
    if residual is None:
        return F.linear(x, weight, bias)
    if bias is None:
        # cuBLAS reads what it adds to from where it writes
        return residual.addmm_(x, weight.t())
    return residual.add_(F.linear(x, weight, bias))


def make(context: OpContext) -> Linear:
    """One function serves every shape."""
    return linear


def make_with(context: OpContext, config: Mapping[str, Any]) -> Linear:
    """The same: torch chooses by itself."""
    return make(context)


def candidates(context: OpContext) -> Iterator[dict[str, Any]]:
    """The one there is."""
    yield {}


def cost(context: OpContext) -> float | None:
    """Measured microseconds, and those that only its neighbours feel."""
    measured = tuned.microseconds(KERNEL, context)
    return measured if measured is None else measured + GAP
