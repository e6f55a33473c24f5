"""A second implementation of what modes do to weights and inputs, to compare with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

Rounding = Callable[[torch.Tensor], torch.Tensor]
"""[..., group] -> the same on the grid that the group's values make."""


def asymmetric(x: torch.Tensor) -> torch.Tensor:
    high, low = x.amax(-1, keepdim=True).clamp(min=0), x.amin(-1, keepdim=True).clamp(max=0)
    scale = ((high - low) / 15).half().float()
    zero = (-low / scale).round()
    return ((x / scale).round().clamp(-zero, 15 - zero)) * scale


def symmetric(x: torch.Tensor) -> torch.Tensor:
    scale = (x.abs().amax(-1, keepdim=True) / 7.5).half().float()
    return (x / scale).round().clamp(-8, 7) * scale


def int8(x: torch.Tensor) -> torch.Tensor:
    scale = x.abs().amax(-1, keepdim=True) / 127
    return (x / scale).round() * scale


def float8(x: torch.Tensor) -> torch.Tensor:
    scale = x.abs().amax(-1, keepdim=True) / 448
    return (x / scale).to(torch.float8_e4m3fn).float() * scale


def by(group: int, rounding: Rounding) -> Rounding:
    return lambda x: rounding(x.reshape(*x.shape[:-1], -1, group)).reshape(x.shape)


def blocks(x: torch.Tensor) -> torch.Tensor:
    """The last block may have fewer rows."""
    parts = [
        float8(square.reshape(1, -1)).view(square.shape) for rows in x.split(128) for square in rows.split(128, dim=1)
    ]
    columns = x.shape[1] // 128
    return torch.cat([torch.cat(parts[first : first + columns], 1) for first in range(0, len(parts), columns)])


@dataclass(frozen=True)
class Rounded:
    """`weights`, `inputs`: how the linears of decoder layers are rounded. `plain`: the ends of the names of others."""

    weights: Rounding
    inputs: Rounding | None = None
    plain: tuple[str, ...] = ()


MODES: Mapping[str, Rounded] = {
    "triton_w4a16": Rounded(by(128, asymmetric)),
    "triton_w4a16 g32": Rounded(by(32, asymmetric)),
    "triton_w4a16 g64": Rounded(by(64, asymmetric)),
    "g64 triton_int4weight": Rounded(by(64, asymmetric)),
    "ppl_w4a16 g32": Rounded(by(32, symmetric)),
    "ppl_w4a16 g64": Rounded(by(64, symmetric)),
    "triton_w8a16": Rounded(int8),
    "triton_w8a8": Rounded(int8, int8),
    "ppl_w8a8": Rounded(int8, int8, ("o_proj",)),
    "ppl_w8a8_mixdown": Rounded(int8, int8, ("o_proj", "layers.1.mlp.down_proj")),
    "fp8w8a8": Rounded(float8, float8),
    "fp8w8a8_b128": Rounded(blocks, by(128, float8)),
}
"""Modes -> what they do to a model whose config.json has the entry mixdown: [1]."""


@torch.no_grad()
def rounded_model(theirs: Any, how: Rounded, plain: tuple[str, ...] = ()) -> Any:
    """A transformers model whose linears and experts in decoder layers are rounded, in place. `plain`: the ends of
    others. The inputs of experts are not rounded."""
    left = how.plain + plain
    for name, module in theirs.named_modules():
        if name.endswith(".experts"):
            for expert in (*module.gate_up_proj, *module.down_proj):
                expert.copy_(how.weights(expert))
        if not isinstance(module, torch.nn.Linear) or ".layers." not in name or (left and name.endswith(left)):
            continue
        module.weight.copy_(how.weights(module.weight))
        if how.inputs is not None:
            module.register_forward_pre_hook(_rounding(how.inputs))
    return theirs


def _rounding(inputs: Rounding) -> Callable[[Any, tuple[torch.Tensor]], tuple[torch.Tensor]]:
    def hook(module: Any, given: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
        return (inputs(given[0]),)

    return hook
