"""linear, kernel cublas: torch's own, so that measurements decide between it and our kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from llmcore.api import OpContext

from llmcore_triton import tuned

GAP = 0.7
"""Microseconds by which the next kernel starts later, since cuBLAS does not overlap with others and our kernels do.
The gaps beside cuBLAS in a profiled decode step of 256 rows on an H200 were 0.5 to 0.8 on average."""

Linear = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]


ALIGNED = 8
"""Half numbers in 16 bytes. If outputs or the start of rows are not multiples of it, cuBLAS cannot use its fast
kernels. A head of 49,155 outputs takes 458 us on an H200 for 64 rows, while reading its weight takes 95 us."""


def make(context: OpContext) -> Linear:
    """Returns one function that serves nearly every shape."""
    outputs = context.shape.get("outputs")
    if context.dtype == "f32" or not isinstance(outputs, int) or outputs < ALIGNED or outputs % ALIGNED == 0:
        return F.linear
    return partial(_in_two, outputs // ALIGNED * ALIGNED)


def _in_two(border: int, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """F.linear in two parts, split at output `border`. The result is a view into wider, aligned rows."""
    y = x.new_empty(x.shape[0], border + ALIGNED)[:, : len(weight)]
    for part in (slice(0, border), slice(border, len(weight))):
        if bias is None:
            torch.mm(x, weight[part].t(), out=y[:, part])
        else:
            torch.addmm(bias[part], x, weight[part].t(), out=y[:, part])
    return y


def make_with(context: OpContext, config: Mapping[str, Any]) -> Linear:
    """The same as `make`: torch chooses the configuration."""
    return make(context)


def candidates(context: OpContext) -> Iterator[dict[str, Any]]:
    """The only configuration."""
    yield {}


def cost(context: OpContext) -> float | None:
    """Measured microseconds, and those by which it delays the next kernel."""
    measured = tuned.microseconds(context)
    return measured if measured is None else measured + GAP
