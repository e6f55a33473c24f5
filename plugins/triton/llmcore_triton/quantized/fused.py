"""moe.fused.w4a16 and moe.fused.w8a16 for few tokens: the launches of moe.fused over weights in words of 16 bits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from llmcore.api import OpContext

from llmcore_triton import tuned
from llmcore_triton.moe import fused
from llmcore_triton.moe.experts import Weight
from llmcore_triton.moe.fused import MOST, FewTokens, Fused, part
from llmcore_triton.quantized import experts
from llmcore_triton.quantized.experts import Packed
from llmcore_triton.specs.rows import NAME


class Coded(Fused, Packed):
    """The op."""

    def __init__(self, context: OpContext, config: Mapping[str, Any]) -> None:
        few = FewTokens(context, config)
        Fused.__init__(self, context, few, few, experts.make(part(context, "moe.experts")))
        Packed.__init__(self, context)

    def __call__(
        self,
        x: torch.Tensor,
        router: torch.Tensor,
        bias: torch.Tensor | None,
        gate_up: Weight,
        down: Weight,
        extra: torch.Tensor | None = None,
        shared: fused.Shared | None = None,
    ) -> torch.Tensor:
        """As that of Fused, with (codes, scale, zero or None) for gate_up and down, canonical or from `pack`."""
        return super().__call__(x, router, bias, self.words(gate_up), self.words(down), extra, shared)


def _part(context: OpContext) -> OpContext:
    return replace(part(context, "moe.experts"), bucket=1, deterministic=False)


def default(context: OpContext) -> dict[str, Any]:
    """One tile of MOST tokens."""
    return experts.tiles(_part(context), MOST)


def candidates(context: OpContext) -> Iterator[dict[str, Any]]:
    """Configurations worth timing."""
    for config in experts.candidates(_part(context)):
        yield {name: [MOST, *tile[1:]] if isinstance(tile, list) else tile for name, tile in config.items()}


def make_with(context: OpContext, config: Mapping[str, Any]) -> Coded:
    """The op in the configuration `config`."""
    return Coded(context, {**default(context), **config})


def make(context: OpContext) -> Coded:
    """The op in the fastest measured configuration, or in the default one."""
    return make_with(context, tuned.choose(NAME, context, {}))
