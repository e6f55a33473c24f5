"""add_rms_norm in place: the sum over the residual, its norm over x. One program per row (see rms_norm)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from llmcore.api import OpContext
from llmcore.layers import Op

from llmcore_triton.rms_norm import PLAIN, candidates, default, launcher, norm_rows
from llmcore_triton.rows import choose

__all__ = ["candidates", "make", "make_with"]


def make_with(context: OpContext, config: Mapping[str, Any]) -> Op:
    """The kernel in the configuration `config`."""
    launch, rows = launcher(norm_rows, context, config, ADD=True, INNER=1, **PLAIN)

    def run(
        x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x, residual [T, size] -> (normed sum, sum). The results are x and residual, changed in place."""
        n, stride = x.shape[0], x.stride(0)
        grid = ((n + rows - 1) // rows,)
        launch(grid, x, residual, weight, x, n, stride, 0, residual.stride(0), stride, eps, x)
        return x, residual

    return run


def make(context: OpContext) -> Op:
    """The kernel in the measured configuration, or in the default one."""
    return make_with(context, choose(context, default(context)))
