"""A cache for models of transformers that sees and changes keys and values before they are attended, and roundings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from transformers import DynamicCache
from witness import Rounding, by, float8, int8

Change = Callable[[int, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""(layer, keys after rope, values), [1, KV heads, T, size] each -> what is kept and attended in their place."""


class ChangedCache(DynamicCache):
    def __init__(self, change: Change) -> None:
        super().__init__()
        self._change = change

    def update(self, key_states: Any, value_states: Any, layer_idx: int, *rest: Any, **more: Any) -> Any:
        k, v = self._change(layer_idx, key_states, value_states)
        return super().update(k, v, layer_idx, *rest, **more)


def rounded(rounding: Rounding) -> ChangedCache:
    return ChangedCache(lambda layer, k, v: (rounding(k), rounding(v)))


def ranged(x: torch.Tensor, steps: int) -> torch.Tensor:
    low = x.amin(-1, keepdim=True)
    scale = (x.amax(-1, keepdim=True) - low) / steps
    return ((x - low) / scale).round() * scale + low


MODES: Mapping[str, Rounding] = {
    "quant_policy_8": lambda x: ranged(x, 255),
    "triton_int8kv": int8,
    "fp8kv_dynamic": float8,
    "quant_policy_4": lambda x: by(min(32, x.shape[-1]), lambda group: ranged(group, 15))(x),
}
"""Modes, by what they cost."""
