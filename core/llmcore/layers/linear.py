"""Linears: single ones, and several linears of a checkpoint stacked into one multiplication."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from llmcore.api.errors import ConfigError
from llmcore.layers.build import (
    Bound,
    Build,
    InputForm,
    LinearCall,
    LinearMethod,
    LinearShape,
    Source,
    Unquantized,
)
from llmcore.layers.layer import Layer
from llmcore.layers.partial import total_of
from llmcore.layers.step import Bucketed
from llmcore.ops import Op
from llmcore.weights.map import Placement, Shard


class Linear(Layer):
    """x W^T + b.

    The constructor only describes the linear. `create_linears` creates the tensors after the model is built, because
    only the path in the model tells which modules of the checkpoint they are, and how these are quantized.

    `outputs`: the number of outputs, or checkpoint module -> its outputs for the modules that it stacks, in order.
    `shard`: the cut over a mesh group, along outputs (dim 0) or inputs (dim 1; the layer then sums over the ranks).
    `replicated`: stacked modules that every rank has whole.
    `weight`: another module's parameter, to use instead of a new one.
    `activation`: an op from [T, outputs] to [T, outputs / 2] that the layer applies to the result.
    `method`: the LinearMethod of a linear that is never quantized as the checkpoint is.
    `partial`: if inputs are cut over several ranks, return the summands as a Partial, for the norm that follows.
    `source`: a norm, or a linear with an activation, whose output this linear alone reads. If the linear is quantized
    together with its inputs, its source writes quantized rows, and gives them as a Rounded. With plain weights, and if
    a plugin wrapped one of the two or a module that has one of them inside, the linear gets tensors. A forward hook of
    either sees what is given.
    """

    unquantized: LinearMethod = Unquantized()
    """The LinearMethod of a plain weight."""

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
        partial: bool = False,
        source: Source | None = None,
    ) -> None:
        super().__init__()
        columns = shard if shard is not None and shard.dim == 0 else None
        named = {} if isinstance(outputs, int) else outputs
        totals = {"": outputs} if isinstance(outputs, int) else dict(outputs)
        parts = {
            name: build.mesh.share(rows, None if name in replicated else columns, name) for name, rows in named.items()
        }
        total = build.mesh.share(outputs, columns, "outputs") if isinstance(outputs, int) else sum(parts.values())
        rows = build.mesh.share(inputs, shard if columns is None else None, "inputs")
        self.shape = LinearShape(
            inputs=rows,
            outputs=total,
            parts=parts,
            bias=bias,
            shard=shard,
            replicated=replicated,
            shared=weight,
            totals={} if columns is None else totals,
        )
        self.build, self.method = build, method
        self.placements: dict[str, Placement] = {}
        self._activation, self._after = activation, tuple[Op, ...]()
        self._form: InputForm | None = None
        self.read(source)
        self._bound: Bound | None = None
        self._calls: tuple[LinearCall, ...] = ()
        self._reduce = build.reduce(shard.group, total) if shard is not None and shard.dim == 1 else None
        self._partial = partial

    @property
    def numbers(self) -> int:
        """The numbers that its weight stands for."""
        return self.shape.inputs * self.shape.outputs

    def read(self, source: Source | None) -> None:
        """Set the source, before the tensors are created; None: no layer writes for this linear."""
        self.sources = () if source is None else (source,)  # in a tuple, torch takes it for no submodule

    def write(self, form: InputForm | None) -> None:
        """See Source. Only an activation that the layer applies itself can write a form."""
        self._form = form
        if self._bound is not None:
            self._choose_activation()

    def create(self, name: str, method: LinearMethod | None) -> None:
        """Create the tensors. `create_linears` calls it once.

        `name`: the linear's path in the model. `method`: how its checkpoint is quantized; None if it is plain. A
        linear that shares another module's weight has its own if it is quantized.
        """
        shape = replace(self.shape, name=name)
        if method is None:
            self._hold(self.method or self.unquantized, shape)
        else:
            self._hold(method, replace(shape, shared=None))

    def share(self, weight: nn.Parameter) -> None:
        """Use another module's parameter as the weight.

        The loader calls it before it fills anything, because it replaces all tensors of the linear.
        """
        self._hold(Unquantized(), replace(self.shape, shared=weight))

    def _hold(self, method: LinearMethod, shape: LinearShape) -> None:
        for name in self.placements:
            delattr(self, name)
        fused = self._activation if self._activation in method.activations else None
        self.shape, self.placements = replace(shape, activation=fused), {}
        self._choose_activation()
        self._bound = method.create(self.shape, self.build)
        for source in self.sources:
            source.write(getattr(self._bound, "takes", None))
        for name, (parameter, placement) in self._bound.tensors().items():
            self.register_parameter(name, parameter)
            self.placements[name] = placement

    def _choose_activation(self) -> None:
        if self._activation is None or self.shape.activation is not None:
            self._after = ()
        else:
            form = self._form if self._reduce is None else None
            self._after = self.build.writer(self._activation, form, size=self.shape.outputs // 2)

    def reorder(self, rows: torch.Tensor) -> None:
        """Reorder the outputs: the new output i is the old output `rows[i]`.

        The owner of the linear calls it in `finish`, which the loader calls before the linear's `finish`. Raises
        ConfigError if the rows of a tensor are not single outputs, such as a scale per block of them.
        """
        by_output = [name for name, placement in self.placements.items() if placement.by_output]
        for tensor in (self.get_parameter(name).data for name in by_output):
            if len(tensor) != len(rows):
                raise ConfigError(
                    f"the outputs of {self.shape.name}, which is quantized in blocks of outputs, cannot be put in "
                    "another order; use the model's unquantized checkpoint"
                )
            held = tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor
            held.copy_(held.index_select(0, rows.to(held.device)))

    def fill_dummy(self, name: str, tensor: torch.Tensor, generator: torch.Generator) -> None:
        """Fill one of the linear's tensors, for `--load_format dummy`."""
        self._created().fill_dummy(name, tensor, generator)

    def finish(self) -> None:
        """Bind the loaded tensors. The loader calls it once."""
        shard = self.shape.shard
        if self.shape.bias and shard is not None and shard.dim == 1 and self.build.mesh.rank(shard.group):
            self.get_parameter("bias").data.zero_()  # the sum over the ranks has it once
        self._calls, done = self._created().bind()
        for name in done:
            delattr(self, name)

    def forward(self, x: torch.Tensor, step: Bucketed) -> torch.Tensor:
        """x [T, inputs] -> [T, outputs], or [T, outputs / 2] with an activation.

        In place of x it takes the Rounded of its source. As a source it returns one, and with `partial` a Partial.
        """
        y = self._calls[step.bucket](x)
        if self._after:
            y = self._after[step.bucket](y)
        if self._reduce is None or self.shape.shard is None:
            return y
        total: torch.Tensor = total_of(y, self.shape.shard.group, self._reduce, self._partial, step)
        return total

    def _created(self) -> Bound:
        assert self._bound is not None, "a linear has no tensors before llmcore.layers.create_linears(model)"
        return self._bound


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
        source: Source | None = None,
    ) -> None:
        value_size = key_size if value_size is None else value_size
        _, held = build.mesh.heads(heads, kv_heads)
        if value_size != key_size and held * build.mesh.size("attn_tp") > kv_heads:
            raise ConfigError(
                f"{kv_heads} KV heads whose values have another size than their keys cannot be repeated for "
                f"{build.mesh.size('attn_tp')} ranks; use at most {kv_heads}"
            )
        # Without repetition any cut between heads will do.
        shard = Shard("attn_tp", 0, key_size if value_size == key_size else 1, repeat=True)
        outputs = {"q_proj": heads * key_size, "k_proj": kv_heads * key_size, "v_proj": kv_heads * value_size}
        super().__init__(build, inputs, outputs, bias=bias, shard=shard, source=source)


class PairedQKV(QKVLinear):
    """QKVLinear for checkpoints whose rope rotates neighbours, elements 2i and 2i + 1 of a head.

    Op `rope` rotates elements i and i + rotated / 2. So `finish` reorders the loaded rows for queries and keys. Scores
    stay the same sums, in another order. `rotated`: rope rotates this number of first elements of a head.
    """

    def __init__(self, build: Build, inputs: int, *, key_size: int, rotated: int, **more: Any) -> None:
        super().__init__(build, inputs, key_size=key_size, **more)
        self._order = torch.cat((apart(rotated), torch.arange(rotated, key_size)))

    def finish(self) -> None:
        """Reorder the rows, then bind. The loader calls it once."""
        rows = torch.arange(self.shape.outputs)
        turned = rows[: self.shape.parts["q_proj"] + self.shape.parts["k_proj"]].view(-1, len(self._order))
        turned.copy_(turned[:, self._order])
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
        source: Source | None = None,
    ) -> None:
        columns = Shard("attn_tp", 0)
        super().__init__(build, inputs, outputs, bias=bias, shard=columns, activation=activation, source=source)
