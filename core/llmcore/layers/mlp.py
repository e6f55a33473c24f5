"""GatedMLP: down(silu(gate(x)) * up(x)); MLP: down(gelu(up(x)))."""

from __future__ import annotations

import torch

from llmcore.layers.build import Build, Source
from llmcore.layers.layer import Layer
from llmcore.layers.linear import Linear, MergedLinear
from llmcore.layers.step import Bucketed
from llmcore.weights.map import Shard


class GatedMLP(Layer):
    """The feed-forward part of a dense block.

    `activation`: an op from [T, 2 inner] to [T, inner]. `partial`, and `source`, the norm whose output this MLP alone
    reads: see Linear.
    """

    def __init__(
        self,
        build: Build,
        size: int,
        inner: int,
        *,
        bias: bool = False,
        activation: str = "silu_and_mul",
        partial: bool = False,
        source: Source | None = None,
    ) -> None:
        super().__init__()
        gate_up = {"gate_proj": inner, "up_proj": inner}
        self.gate_up_proj = MergedLinear(build, size, gate_up, bias=bias, activation=activation, source=source)
        inputs = Shard("attn_tp", 1)
        self.down_proj = Linear(build, inner, size, bias=bias, shard=inputs, partial=partial, source=self.gate_up_proj)

    def forward(self, x: torch.Tensor, step: Bucketed) -> torch.Tensor:
        """[T, size] -> [T, size]."""
        return self.down_proj(self.gate_up_proj(x, step), step)  # type: ignore[no-any-return]


class MLP(Layer):
    """The feed-forward part of a block without a gate. `activation`: an op from [T, inner] to [T, inner]."""

    def __init__(
        self, build: Build, size: int, inner: int, *, bias: bool = False, activation: str = "gelu_tanh"
    ) -> None:
        super().__init__()
        columns = Shard("attn_tp", 0)
        self.up_proj = Linear(build, size, inner, bias=bias, shard=columns)
        self.down_proj = Linear(build, inner, size, bias=bias, shard=Shard("attn_tp", 1))
        self._activation = build.op(activation, size=build.mesh.share(inner, columns, "inner"))

    def forward(self, x: torch.Tensor, step: Bucketed) -> torch.Tensor:
        """[T, size] -> [T, size]."""
        return self.down_proj(self._activation[step.bucket](self.up_proj(x, step)), step)  # type: ignore[no-any-return]
