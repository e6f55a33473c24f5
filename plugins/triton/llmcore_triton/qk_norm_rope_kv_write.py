"""qk_norm_rope_kv_write in one pass: rope_kv_write's kernel, which also norms each head before rope."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from llmcore.api import OpContext
from llmcore.layers import KV, Op

from llmcore_triton.rope_kv_write import by_value_size, candidates, default, four
from llmcore_triton.rows import choose

__all__ = ["candidates", "make", "make_with"]


def make_with(context: OpContext, config: Mapping[str, Any]) -> Op:
    """The kernel in the configuration `config`."""
    kernel, blocks = by_value_size(context, config, norm=True)

    def run(
        qk: torch.Tensor,
        v: torch.Tensor,
        norms: tuple[torch.Tensor, torch.Tensor],
        eps: float,
        cos: torch.Tensor,
        sin: torch.Tensor,
        kv: KV,
        slots: torch.Tensor,
    ) -> torch.Tensor:
        """qk [T, heads + kv_heads, size], v [T, kv_heads, value_size] -> qk itself, normed and rotated."""
        parts = (qk, v, cos, sin, *four(kv), slots, *norms, eps, *qk.stride()[:2], *v.stride()[:2])
        kernel(v.shape[2])((qk.shape[0], blocks), *parts)
        return qk

    return run


def make(context: OpContext) -> Op:
    """The kernel in the measured configuration, or in the default one."""
    return make_with(context, choose(context, default(context)))
