"""linear, kernel cublas: torch's own, so that what was measured decides between it and ours."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from llmcore.api import OpContext

from llmcore_triton import tuned

KERNEL = "cublas"

GAP = 0.7
"""Microseconds that a kernel after this one starts late: none overlaps with cuBLAS, ours overlap with each other. The
gaps beside cuBLAS in a profiled decode step of 256 rows on an H200 were 0.5 to 0.8 on average."""

Linear = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]


ALIGNED = 8
"""Half numbers in 16 bytes: rows of results that start at other places cost cuBLAS its fast kernels."""


def make(context: OpContext) -> Linear:
    """One function serves nearly every shape."""
    outputs = context.shape.get("outputs")
    if context.dtype == "f32" or not isinstance(outputs, int) or outputs < ALIGNED or outputs % ALIGNED == 0:
        return F.linear
    return partial(_aligned, -(-outputs // ALIGNED) * ALIGNED)


def _aligned(room: int, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """F.linear whose result is a part of rows of `room` numbers."""
    y = x.new_empty(x.shape[0], room)[:, : len(weight)]
    if bias is None:
        return torch.mm(x, weight.t(), out=y)
    return torch.addmm(bias, x, weight.t(), out=y)


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
