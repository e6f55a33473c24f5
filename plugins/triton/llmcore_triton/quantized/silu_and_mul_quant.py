"""silu_and_mul_quant: silu_and_mul, and its result as codes and scales, in one launch (see quantize_rows)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from llmcore.api import OpContext
from llmcore.layers import Op

from llmcore_triton.quantized.quantize_rows import candidates, default, launcher
from llmcore_triton.rows import choose

__all__ = ["candidates", "default", "make", "make_with"]


def make_with(context: OpContext, config: Mapping[str, Any]) -> Op:
    """The kernel in the configuration `config`."""
    launch = launcher(context, config, gated=True)

    def run(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """x [T, 2 size], gate first -> codes [T, size], scales [T, size / group]."""
        return launch(x, None)

    return run


def make(context: OpContext) -> Op:
    """The kernel in the measured configuration, or in the default one."""
    return make_with(context, choose(context, default(context)))
