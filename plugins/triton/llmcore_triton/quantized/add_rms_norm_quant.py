"""add_rms_norm_quant: the sum over the residual, in place, and its norm as codes and scales, in one launch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from llmcore.api import OpContext
from llmcore.layers import Op

from llmcore_triton.quantized.rows import Outputs, form
from llmcore_triton.rms_norm import candidates, default, launcher, norm_rows
from llmcore_triton.rows import choose

__all__ = ["candidates", "default", "make", "make_with"]


def make_with(context: OpContext, config: Mapping[str, Any]) -> Op:
    """The kernel in the configuration `config`."""
    launch, rows = launcher(norm_rows, context, config, ADD=True, INNER=1, **form(context))
    outputs = Outputs(context)

    def run(
        x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """x, residual [T, size] -> codes [T, size], scales [T, size / group], sum. The sum is residual, changed in
        place."""
        n, (codes, scales) = x.shape[0], outputs(x)
        grid = ((n + rows - 1) // rows,)
        launch(grid, x, residual, weight, codes, n, x.stride(0), 0, residual.stride(0), codes.stride(0), eps, scales)
        return codes, scales, residual

    return run


def make(context: OpContext) -> Op:
    """The kernel in the measured configuration, or in the default one."""
    return make_with(context, choose(context, default(context)))
