"""Linears: single ones, and several linears of a checkpoint stacked into one multiplication."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from llmcore.api.errors import ConfigError
from llmcore.layers.build import Bound, Build, LinearCall, LinearMethod, LinearShape
from llmcore.layers.layer import Layer
from llmcore.layers.step import Bucketed
from llmcore.weights.map import Placement, Shard


class Linear(Layer):
    """x W^T + b.

    `outputs`: the number of outputs, or checkpoint module -> its outputs for the modules that it stacks, in order.
    `shard`: the cut over a mesh group, along outputs (dim 0) or inputs (dim 1; the layer then sums over the ranks).
    `replicated`: stacked modules that every rank has whole.
    `weight`: another module's parameter, to use instead of a new one.
    `activation`: an op from [T, outputs] to [T, outputs / 2] that the layer applies to the result.
    `method`: the LinearMethod, if it differs from the model's.
    """

    def __init__(
        self,
        build: Build,
        inputs: int,
        outputs: int | Mapping[str, int],
        *,
        bias: bool = False,
        shard: Shard | None = None,
        replicated: frozenset[str] = frozenset(),
        weight: nn.Parameter | None = None,
        activation: str | None = None,
        method: LinearMethod | None = None,
    ) -> None:
        super().__init__()
        columns = shard if shard is not None and shard.dim == 0 else None
        named = {} if isinstance(outputs, int) else outputs
        parts = {
            name: build.mesh.share(rows, None if name in replicated else columns, name) for name, rows in named.items()
        }
        total = build.mesh.share(outputs, columns, "outputs") if isinstance(outputs, int) else sum(parts.values())
        rows = build.mesh.share(inputs, shard if columns is None else None, "inputs")
        method = build.linear_method if method is None else method
        along = activation if activation in method.activations else None
        shape = LinearShape(
            inputs=rows,
            outputs=total,
            parts=parts,
            bias=bias,
            shard=shard,
            replicated=replicated,
            shared=weight,
            activation=along,
        )
        self._after = None if activation == along else build.op(str(activation), size=total // 2)
        self._calls: tuple[LinearCall, ...] = ()
        self._reduce = build.reduce(shard.group) if shard is not None and shard.dim == 1 else None
        self.placements: dict[str, Placement] = {}
        self._create = partial(_create, method, build, shape)
        self._hold(method.create(shape, build), weight)

    def _hold(self, bound: Bound, shared: nn.Parameter | None) -> None:
        for name in self.placements:
            delattr(self, name)
        tensors = {} if shared is None else {"weight": (shared, Placement())}
        self._bound, self.placements = bound, {}
        for name, (parameter, placement) in {**tensors, **bound.tensors()}.items():
            self.register_parameter(name, parameter)
            self.placements[name] = placement

    def share(self, weight: nn.Parameter | None) -> None:
        """Use another module's parameter as the weight, or with None create an own weight again.

        The loader calls it before it fills anything, because it replaces all tensors of the linear.
        """
        self._hold(self._create(weight), weight)

    def reorder(self, rows: torch.Tensor) -> None:
        """Reorder the outputs: the new output i is the old output `rows[i]`.

        The owner of the linear calls it in `finish`, which the loader calls before the linear's `finish`. Raises
        ConfigError if no tensor of the linear has one row per output.
        """
        found = [tensor.data for tensor in self.parameters() if tensor.dim() and tensor.shape[0] == len(rows)]
        if not found:
            raise ConfigError(
                "the outputs of a linear that is quantized like this cannot be put in another order; "
                "use the model's unquantized checkpoint"
            )
        for tensor in found:
            held = tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor
            held.copy_(held.index_select(0, rows.to(held.device)))

    def finish(self) -> None:
        """Bind the loaded tensors. The loader calls it once."""
        self._calls, done = self._bound.bind()
        for name in done:
            delattr(self, name)

    def forward(self, x: torch.Tensor, step: Bucketed) -> torch.Tensor:
        """x [T, inputs] -> [T, outputs], or [T, outputs / 2] with an activation."""
        y = self._calls[step.bucket](x)
        if self._after is not None:
            y = self._after[step.bucket](y)
        return y if self._reduce is None else self._reduce[step.bucket](y)


def _create(method: LinearMethod, build: Build, shape: LinearShape, weight: nn.Parameter | None) -> Bound:
    """New tensors for an existing linear."""
    return method.create(replace(shape, shared=weight), build)


class QKVLinear(Linear):
    """q_proj, k_proj and v_proj in one linear; returns [T, (heads + kv_heads) key_size + kv_heads value_size]."""

    def __init__(
        self,
        build: Build,
        inputs: int,
        *,
        heads: int,
        kv_heads: int,
        key_size: int,
        value_size: int | None = None,
        bias: bool = False,
    ) -> None:
        value_size = key_size if value_size is None else value_size
        outputs = {"q_proj": heads * key_size, "k_proj": kv_heads * key_size, "v_proj": kv_heads * value_size}
        super().__init__(build, inputs, outputs, bias=bias, shard=Shard("attn_tp", 0, key_size))


class PairedQKV(QKVLinear):
    """QKVLinear for checkpoints whose rope rotates neighbours, elements 2i and 2i + 1 of a head.

    Op `rope` rotates elements i and i + rotated / 2. So `finish` reorders the loaded rows for queries and keys. Scores
    stay the same sums, in another order. `rotated`: rope rotates this number of first elements of a head.
    """

    def __init__(self, build: Build, inputs: int, *, key_size: int, rotated: int, **more: Any) -> None:
        super().__init__(build, inputs, key_size=key_size, **more)
        self._order = torch.cat((apart(rotated), torch.arange(rotated, key_size)))
        if other := ", ".join(sorted(self.placements.keys() - {"weight", "bias"})):
            raise ConfigError(
                f"rope of neighbours needs plain weights, not quantized ones with {other}; "
                "use the model's unquantized checkpoint"
            )

    def finish(self) -> None:
        """Reorder the rows, then bind. The loader calls it once."""
        rows, size = torch.arange(self.get_parameter("weight").shape[0]), len(self._order)
        for part in ("q_proj", "k_proj"):
            found = rows.narrow(0, *self.placements["weight"].parts[part]).view(-1, size)
            found.copy_(found[:, self._order])
        self.reorder(rows)
        super().finish()


def apart(rotated: int) -> torch.Tensor:
    """The order [rotated] int64 that turns pairs side by side into two halves: element i comes from `order[i]`."""
    return torch.arange(rotated).view(-1, 2).t().reshape(-1)


class MergedLinear(Linear):
    """Several linears over the same input as one, such as gate_proj and up_proj, with the activation that joins them.

    `activation`: an op from [T, all outputs] to half the width.
    """

    def __init__(
        self,
        build: Build,
        inputs: int,
        outputs: Mapping[str, int],
        *,
        bias: bool = False,
        activation: str | None = None,
    ) -> None:
        super().__init__(build, inputs, outputs, bias=bias, shard=Shard("attn_tp", 0), activation=activation)
