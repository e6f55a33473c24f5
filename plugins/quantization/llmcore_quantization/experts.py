"""Experts with quantized weights: the ExpertMethod of a Scheme. Their inputs stay as they are.

A step dequantizes the experts that its tokens chose, and the kernel of `moe.experts` multiplies them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

import torch
from llmcore.api import Placement
from llmcore.layers import BoundExperts, Build, Dispatched, ExpertShape
from torch import nn

from llmcore_quantization.canonical import Scheme, dequantized
from llmcore_quantization.linear import Held, multiples

Op = Callable[..., torch.Tensor]
"""A callable that computes as op `moe.experts`."""

Stack = Mapping[str, torch.Tensor]
"""Canonical tensor -> [experts, rows, ...] of all experts."""


class QuantizedExperts:
    """The ExpertMethod of experts whose weights are quantized by one scheme, with inputs in their own order."""

    def __init__(self, scheme: Scheme) -> None:
        self.scheme = replace(scheme, inputs="plain")
        self.multiples = multiples(scheme)

    def create(self, shape: ExpertShape, build: Build) -> BoundExperts:
        """The canonical tensors. Raises ConfigError if the groups do not divide the inputs."""
        return _Experts(self.scheme, shape, build)


class _Experts:
    """layers.BoundExperts."""

    ops: tuple[Op, ...] | None

    def __init__(self, scheme: Scheme, shape: ExpertShape, build: Build) -> None:
        self._experts = shape.experts
        self._stacks = {leaf: Held(scheme, stack, build) for leaf, stack in shape.stacks.items()}
        size, inner = shape.gate_up.inputs, shape.down.inputs
        plain = build.op("moe.experts", experts=shape.experts, top_k=shape.top_k, size=size, inner=inner)
        self.ops = tuple(partial(_run, op, shape.experts) for op in plain)

    def tensors(self) -> Mapping[str, tuple[nn.Parameter, Placement]]:
        """The parameters by name, with their Placements."""
        stacks = self._stacks.items()
        return {f"{leaf}_{name}": found for leaf, stack in stacks for name, found in stack.tensors().items()}

    def bind(self) -> tuple[Stack, Stack]:
        """The canonical tensors of gate_up and of down."""
        gate_up, down = (self._by_expert(stack) for stack in self._stacks.values())
        return gate_up, down

    def _by_expert(self, stack: Held) -> Stack:
        held = {name: parameter.data for name, (parameter, _) in stack.tensors().items()}
        return {name: tensor.view(self._experts, -1, tensor.shape[1]) for name, tensor in held.items()}

    def fill_dummy(self, name: str, tensor: torch.Tensor, generator: torch.Generator) -> None:
        """As in a linear of the scheme."""
        leaf = next(leaf for leaf in self._stacks if name.startswith(f"{leaf}_"))
        self._stacks[leaf].fill_dummy(name.removeprefix(f"{leaf}_"), tensor, generator)


def _run(plain: Op, experts: int, tokens: Dispatched, gate_up: Stack, down: Stack) -> torch.Tensor:
    """The experts' op. All shapes follow from the number of tokens, so that it can be captured."""
    pairs, chosen = len(tokens.pairs), None
    if pairs < experts:
        # Every pair gets an expert of its own, the one that it chose; those after them have no tokens and no weights.
        numbers = torch.arange(experts + 1, dtype=torch.int32, device=tokens.starts.device)
        chosen = torch.searchsorted(tokens.starts[1:], numbers[:pairs], right=True)
        tokens = Dispatched(tokens.x, tokens.pairs, numbers.clamp(max=pairs))
    dtype = tokens.x.dtype
    y: torch.Tensor = plain(tokens, _weights(gate_up, chosen, dtype), _weights(down, chosen, dtype))
    return y


def _weights(stack: Stack, chosen: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """The plain weights [experts, rows, inputs] of the `chosen` experts [P] int64; None: of all."""
    held = stack if chosen is None else {name: _picked(tensor, chosen) for name, tensor in stack.items()}
    codes = held["codes"]
    inputs = codes.shape[2] * (2 if codes.dtype == torch.uint8 else 1)
    out = torch.empty(*codes.shape[:2], inputs, dtype=dtype, device=codes.device)
    for expert, weight in enumerate(out):  # one after the other, so that the f32 form stays small
        weight.copy_(dequantized(**{name: tensor[expert] for name, tensor in held.items()}, dtype=dtype))
    return out


def _picked(tensor: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """torch cannot pick rows of float8, but their bytes."""
    held = tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor
    return held.index_select(0, chosen).view(tensor.dtype)
