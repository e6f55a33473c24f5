"""rope in three calls of torch: a CPU step has few tokens, so the number of calls decides its time."""

from __future__ import annotations

import torch

from llmcore.api import OpContext
from llmcore.layers import Op


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """See llmcore.ops.rope: x [T, heads, size], cos and sin [T, size]."""
    turned = torch.addcmul(x * cos.unsqueeze(1), x.roll(cos.shape[-1] // 2, -1), sin.unsqueeze(1))
    return turned.to(x.dtype)


def make(context: OpContext) -> Op:
    """The kernel. It rotates whole heads only (see `refuses` in the spec)."""
    return rotate
