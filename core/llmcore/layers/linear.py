"""Linears: single, and several of a checkpoint's stacked into one multiplication."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from llmcore.errors import ConfigError
from llmcore.layers.build import Bound, Build, LinearCall, LinearMethod, LinearShape
from llmcore.layers.layer import Layer
from llmcore.layers.step import Bucketed
from llmcore.weights.map import Placement, Shard


class Linear(Layer):
    """x W^T + b. `outputs`: how many, or the checkpoint modules it stacks with their outputs, in order.

    `shard`: the mesh group it is cut over, along outputs (dim 0) or inputs (dim 1, then results are summed over the
    ranks). `replicated`: stacked modules that every rank has whole. `weight`: another module's parameter to use
    instead of one of its own. `activation`: an op from [T, outputs] to half as many, applied to the result. `method`:
    how the weight is held, if not as the model's others.
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
        """Use another module's parameter as the weight, or for None hold one as the model's other linears do.

        For the loader, before it fills anything: all of the linear's tensors are new.
        """
        self._hold(self._create(weight), weight)

    def reorder(self, rows: torch.Tensor) -> None:
        """Let output i be what was output `rows[i]`; for an owner's `finish`, which comes before the linear's own.

        Raises ConfigError where no tensor of the linear has a row per output.
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
        """Bind what was loaded; called once by the loader."""
        self._calls, done = self._bound.bind()
        for name in done:
            delattr(self, name)

    def forward(self, x: torch.Tensor, step: Bucketed) -> torch.Tensor:
        """x [T, inputs] -> [T, outputs], or half of that after an activation."""
        y = self._calls[step.bucket](x)
        if self._after is not None:
            y = self._after[step.bucket](y)
        return y if self._reduce is None else self._reduce[step.bucket](y)


def _create(method: LinearMethod, build: Build, shape: LinearShape, weight: nn.Parameter | None) -> Bound:
    """The tensors of a linear that exists already: its op was counted then."""
    with build.for_prompts():
        return method.create(replace(shape, shared=weight), build)


class QKVLinear(Linear):
    """q_proj, k_proj and v_proj in one; gives [T, (heads + kv_heads) key_size + kv_heads value_size]."""

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
    """QKVLinear of checkpoints whose rope turns neighbours, elements 2i and 2i + 1 of a head.

    Ours turns i and i + rotated / 2, so the rows that make queries and keys are put in that order when they were
    loaded: scores are the same sums in another order. `rotated`: elements of a head that turn, the first ones.
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
        """Order the rows, then bind; called once by the loader."""
        rows, size = torch.arange(self.get_parameter("weight").shape[0]), len(self._order)
        for part in ("q_proj", "k_proj"):
            found = rows.narrow(0, *self.placements["weight"].parts[part]).view(-1, size)
            found.copy_(found[:, self._order])
        self.reorder(rows)
        super().finish()


def apart(rotated: int) -> torch.Tensor:
    """Where each element of what turns comes from, [rotated] int64: pairs side by side -> one half, the other."""
    return torch.arange(rotated).view(-1, 2).t().reshape(-1)


class MergedLinear(Linear):
    """Several linears over the same input, such as gate_proj and up_proj, in one, and the activation that joins them.

    `activation`: an op from [T, all outputs] to half as many.
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
