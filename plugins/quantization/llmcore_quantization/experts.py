"""Experts with quantized weights: the ExpertMethod of a Scheme. Their inputs stay as they are.

Ops `moe.fused.w4a16` and `moe.fused.w8a16` multiply them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from llmcore.api import Placement
from llmcore.layers import BoundExperts, Build, ExpertShape, Op, packed, packing
from torch import nn

from llmcore_quantization.canonical import Scheme
from llmcore_quantization.linear import Held, multiples
from llmcore_quantization.ops.moe_experts_w4a16 import Stack, told


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

    def __init__(self, scheme: Scheme, shape: ExpertShape, build: Build) -> None:
        self._scheme, self._experts, self._build = scheme, shape.experts, build
        self._stacks = {leaf: Held(scheme, stack, build) for leaf, stack in shape.stacks.items()}
        self._pack: Callable[..., Any] | None = None

    def tensors(self) -> Mapping[str, tuple[nn.Parameter, Placement]]:
        """The parameters by name, with their Placements."""
        stacks = self._stacks.items()
        return {f"{leaf}_{name}": found for leaf, stack in stacks for name, found in stack.tensors().items()}

    def fused(self, shape: Mapping[str, Any]) -> tuple[Op, ...]:
        """The op of the scheme's bits."""
        op = "moe.fused.w4a16" if self._scheme.codes == "u4" else "moe.fused.w8a16"
        ops = self._build.op(op, **shape, **told(self._scheme))
        self._pack = packing(ops)
        return ops

    def bind(self) -> tuple[Stack, Stack]:
        """gate_up and down as the op takes them. Packed tensors replace the canonical ones in their parameters."""
        gate_up, down = (self._bound(stack) for stack in self._stacks.values())
        return gate_up, down

    def _bound(self, stack: Held) -> Stack:
        held = {name: parameter for name, (parameter, _) in stack.tensors().items()}
        found: dict[str, Any] = {
            name: parameter.data.view(self._experts, -1, parameter.shape[1]) for name, parameter in held.items()
        }
        if self._pack is not None:
            found = packed(self._pack, found)
            for name, parameter in held.items():
                parameter.data = parameter.new_empty(0) if found[name] is None else found[name]
        return found["codes"], found["scale"], found.get("zero")

    def fill_dummy(self, name: str, tensor: torch.Tensor, generator: torch.Generator) -> None:
        """As in a linear of the scheme."""
        leaf = next(leaf for leaf in self._stacks if name.startswith(f"{leaf}_"))
        self._stacks[leaf].fill_dummy(name.removeprefix(f"{leaf}_"), tensor, generator)
