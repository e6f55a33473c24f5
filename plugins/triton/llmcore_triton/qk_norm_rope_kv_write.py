"""qk_norm_rope_kv_write in one pass: rope_kv_write's kernel, which also norms each head before rope."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from llmcore.api import OpContext
from llmcore.layers import Op

from llmcore_triton.launch import Bound
from llmcore_triton.rope_kv_write import candidates, default, fixed_parts, rotate_and_store
from llmcore_triton.rows import choose, power

__all__ = ["candidates", "make", "make_with"]


def make_with(context: OpContext, config: Mapping[str, Any]) -> Op:
    """The kernel in the configuration `config`."""
    fixed, blocks = fixed_parts(context, config, norm=True)
    launch = Bound(rotate_and_store, **fixed)

    def run(
        qk: torch.Tensor,
        v: torch.Tensor,
        norms: tuple[torch.Tensor, torch.Tensor],
        eps: float,
        cos: torch.Tensor,
        sin: torch.Tensor,
        kv: tuple[torch.Tensor, torch.Tensor],
        slots: torch.Tensor,
    ) -> torch.Tensor:
        """qk [T, heads + kv_heads, size], v [T, kv_heads, value_size] -> qk itself, normed and rotated."""
        width = v.shape[2]
        strides = (qk.stride(0), qk.stride(1), v.stride(0), v.stride(1))
        parts = (qk, v, cos, sin, *kv, slots, *norms, eps, *strides)
        launch.but(VALUE_SIZE=width, VALUE=power(width))((qk.shape[0], blocks), *parts)
        return qk

    return run


def make(context: OpContext) -> Op:
    """The kernel in the measured configuration, or in the default one."""
    return make_with(context, choose(context, default(context)))
