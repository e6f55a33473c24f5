"""head_linear, kernel cublas: torch's own batched product, for many tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from llmcore.api import OpContext
from llmcore.layers import Op


def run(x: torch.Tensor, weight: torch.Tensor, beside: torch.Tensor | None = None) -> torch.Tensor:
    """x [T, heads, inputs], weight [heads, outputs, inputs] of any strides, beside [T, heads, rest] or None ->
    [T, heads, outputs + rest], contiguous."""
    heads, outputs, _ = weight.shape
    rest = 0 if beside is None else beside.shape[2]
    out = x.new_empty(x.shape[0], heads, outputs + rest)
    torch.bmm(x.transpose(0, 1), weight.transpose(1, 2), out=out[..., :outputs].transpose(0, 1))
    if beside is not None:
        out[..., outputs:] = beside
    return out


def make(context: OpContext) -> Op:
    """Returns one function that serves every shape."""
    return run


def make_with(context: OpContext, config: Mapping[str, Any]) -> Op:
    """The same as `make`: torch chooses the configuration."""
    return run


def candidates(context: OpContext) -> Iterator[dict[str, Any]]:
    """The only configuration."""
    yield {}
