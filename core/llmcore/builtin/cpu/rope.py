"""rope in three calls: a CPU step has few tokens, so what counts is how often torch is entered."""

from __future__ import annotations

import torch

from llmcore.api import OpContext
from llmcore.layers import Op


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """See llmcore.ops.rope: x [T, heads, size], cos and sin [T, size]."""
    turned = torch.addcmul(x * cos.unsqueeze(1), x.roll(cos.shape[-1] // 2, -1), sin.unsqueeze(1))
    return turned.to(x.dtype)


def make(context: OpContext) -> Op:
    """The kernel; it turns whole heads (see `refuses` in the spec)."""
    return rotate
