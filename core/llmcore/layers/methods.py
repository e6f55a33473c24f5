"""The seam for weight quantization: a LinearMethod owns every tensor of the linears it takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Protocol

import torch
from torch import nn

from llmcore.ops import Op
from llmcore.weights.map import Placement, Shard

if TYPE_CHECKING:
    from llmcore.layers.build import Build

LinearCall = Callable[[torch.Tensor], torch.Tensor]
"""x [T, inputs] -> [T, outputs], or what the shape's activation makes of that."""


@dataclass(frozen=True, kw_only=True)
class LinearShape:
    """What a linear computes on this rank. `parts`: the checkpoint modules it stacks and their rows, {} for one.

    `shard` cuts outputs (dim 0) or inputs (dim 1), except of parts that are `replicated`. `shared`: a weight that
    another module owns and reads plainly. `activation`: the op from [T, outputs] to [T, outputs / 2] that follows and
    is computed along with the linear; set only for methods that name it in `activations`.
    """

    inputs: int
    outputs: int
    parts: Mapping[str, int] = field(default_factory=dict)
    bias: bool = False
    shard: Shard | None = None
    replicated: frozenset[str] = frozenset()
    shared: nn.Parameter | None = None
    activation: str | None = None


class Bound(Protocol):
    """The tensors of one linear."""

    def tensors(self) -> Mapping[str, tuple[nn.Parameter, Placement]]:
        """Parameters by name, allocated, with how a checkpoint fills them."""

    def bind(self) -> tuple[tuple[LinearCall, ...], frozenset[str]]:
        """Called once, when the tensors are filled: a callable (x [T, inputs] -> [T, outputs], the bias added and the
        activation applied) for each of TOKEN_BUCKETS, and the names of parameters that are needed no longer because
        the callables hold something better. Of inputs that are cut, the layer sums the results over the ranks.
        """


class LinearMethod(Protocol):
    """How weights are held and multiplied.

    `activations`: the ops that its linears can compute along (`LinearShape.activation`). The layer applies any other
    one itself, so a method that knows none says ``frozenset()``.
    """

    @property
    def activations(self) -> frozenset[str]:
        """Names of ops."""

    def create(self, shape: LinearShape, build: Build) -> Bound:
        """The tensors of one linear. Says in its Placements along which axis, in what multiples, each is cut."""


class Unquantized:
    """Weights in the model's dtype, multiplied by op `linear`, or `linear_<activation>`."""

    activations = frozenset({"silu_and_mul"})

    def create(self, shape: LinearShape, build: Build) -> Bound:
        """A weight and perhaps a bias."""
        return _Plain(shape, build)


class _Plain:
    def __init__(self, shape: LinearShape, build: Build) -> None:
        self.shape = shape
        if shape.activation is None:
            self.ops = build.op("linear", inputs=shape.inputs, outputs=shape.outputs, bias=shape.bias)
        else:
            half = shape.outputs // 2
            self.ops = build.op(f"linear_{shape.activation}", inputs=shape.inputs, size=half, bias=shape.bias)
        self.weight = build.empty(shape.outputs, shape.inputs) if shape.shared is None else shape.shared
        self.bias = build.empty(shape.outputs) if shape.bias else None

    def tensors(self) -> Mapping[str, tuple[nn.Parameter, Placement]]:
        parts, first = {}, 0
        for name, rows in self.shape.parts.items():
            parts[name] = (first, rows)
            first += rows
        shard, replicated = self.shape.shard, self.shape.replicated
        tensors = {"weight": (self.weight, Placement(parts, shard, replicated))}
        if self.bias is not None:
            # a row-parallel bias is whole on every rank
            tensors["bias"] = (self.bias, Placement(parts, shard if shard and shard.dim == 0 else None, replicated))
        return tensors

    def bind(self) -> tuple[tuple[LinearCall, ...], frozenset[str]]:
        pack = None if self.shape.shared is not None else _packing(self.ops)
        weight = self.weight.data if pack is None else pack(self.weight.data)
        bias = None if self.bias is None else self.bias.data
        calls = tuple(partial(_call, op, weight, bias) for op in self.ops)
        del self.weight
        return calls, frozenset() if pack is None else frozenset({"weight"})


def _call(op: Op, weight: torch.Tensor, bias: torch.Tensor | None, x: torch.Tensor) -> torch.Tensor:
    y: torch.Tensor = op(x, weight, bias)
    return y


def _packing(ops: tuple[Op, ...]) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """How to pack the weight, where the kernels of all buckets agree on it (see llmcore.ops.linear)."""
    names = {getattr(op, "packing", None) for op in ops}
    return None if None in names or len(names) > 1 else ops[0].pack  # type: ignore[attr-defined]
