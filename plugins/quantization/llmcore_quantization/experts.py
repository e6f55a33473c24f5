"""Experts with quantized weights: the ExpertMethod of a Scheme. Their inputs stay as they are.

A step dequantizes some experts at a time, first those that its tokens chose, and the kernel of `moe.experts`
multiplies them. All mixtures of a model dequantize into the same memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from llmcore.api import Placement
from llmcore.layers import BoundExperts, Build, Dispatched, ExpertShape
from torch import nn

from llmcore_quantization.canonical import Scheme, dequantized
from llmcore_quantization.linear import Held, multiples

Op = Callable[..., torch.Tensor]
"""A callable that computes as op `moe.experts`."""

Stack = Mapping[str, torch.Tensor]
"""Canonical tensor -> [experts, rows, ...] of all experts."""


AT_A_TIME = 1 << 27
"""The most weights that are dequantized at a time, unless one expert has more: 256 MiB in a half type."""

CHUNK = 1 << 23
"""Number of weights dequantized by one call, so that its intermediate results stay small."""


class Scratch:
    """The memory for dequantized weights, one tensor for each stack of experts and shape.

    It is held between steps, so that kernels find weights at addresses that they know. The experts of Mixtral-8x7B
    have 176 million weights each, so it takes 352 MB in a half type; all eight of a layer would take 2.8 GB.
    """

    def __init__(self) -> None:
        self._held: dict[tuple[object, ...], torch.Tensor] = {}

    def tensor(self, leaf: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """The tensor for stack `leaf`, with any content."""
        key = (leaf, shape, dtype, device)
        if key not in self._held:
            self._held[key] = torch.empty(shape, dtype=dtype, device=device)
        return self._held[key]


class QuantizedExperts:
    """The ExpertMethod of experts whose weights are quantized by one scheme, with inputs in their own order."""

    def __init__(self, scheme: Scheme, scratch: Scratch) -> None:
        self.scheme, self._scratch = replace(scheme, inputs="plain"), scratch
        self.multiples = multiples(scheme)

    def create(self, shape: ExpertShape, build: Build) -> BoundExperts:
        """The canonical tensors. Raises ConfigError if the groups do not divide the inputs."""
        return _Experts(self.scheme, self._scratch, shape, build)


class _Experts:
    """layers.BoundExperts."""

    ops: tuple[Op, ...] | None

    def __init__(self, scheme: Scheme, scratch: Scratch, shape: ExpertShape, build: Build) -> None:
        self._experts = shape.experts
        self._stacks = {leaf: Held(scheme, stack, build) for leaf, stack in shape.stacks.items()}
        size, inner = shape.gate_up.inputs, shape.down.inputs
        some = _at_a_time(shape.experts, 3 * size * inner)
        plain = build.op("moe.experts", experts=some, top_k=shape.top_k, size=size, inner=inner)
        rows = {"gate_up_proj": (some, 2 * inner, size), "down_proj": (some, size, inner)}
        both, last = (scratch.tensor(leaf, held, build.dtype, build.torch_device) for leaf, held in rows.items())
        self.ops = tuple(partial(_run, op, shape.top_k, both, last) for op in plain)

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


def _at_a_time(experts: int, weights: int) -> int:
    """The number of experts, with `weights` weights each, that are dequantized together. It divides their number."""
    return max((n for n in range(1, experts + 1) if experts % n == 0 and n * weights <= AT_A_TIME), default=1)


def _run(
    plain: Op, top_k: int, both: torch.Tensor, last: torch.Tensor, tokens: Dispatched, gate_up: Stack, down: Stack
) -> torch.Tensor:
    """The experts' op, with memory for the plain weights of some experts: `both` for gate_up, `last` for down.

    All shapes follow from the number of tokens, so that it can be captured.
    """
    counts, some = tokens.starts.diff(), len(both)
    # Experts with tokens come first, and at most one for each pair has any.
    order = (counts == 0).to(torch.uint8).argsort(stable=True)
    starts = F.pad(counts[order].cumsum(0, dtype=torch.int32), (1, 0))
    y = tokens.x.new_empty(len(tokens.x) * top_k, tokens.x.shape[1])
    for first in range(0, min(len(tokens.pairs), len(counts)), some):
        borders = starts[first : first + some + 1]
        if borders.is_cpu and borders[0] == borders[-1]:
            break  # a device that runs behind the host would make it wait for such an answer
        chosen = order[first : first + some]
        _dequantize(gate_up, chosen, both)
        _dequantize(down, chosen, last)
        plain(replace(tokens, starts=borders), both, last, y)
    return y


def _dequantize(stack: Stack, chosen: torch.Tensor, out: torch.Tensor) -> None:
    """Write the plain weights of the `chosen` experts [E] int64 to `out` [E, rows, inputs]."""
    held = {name: _picked(tensor, chosen).flatten(0, 1) for name, tensor in stack.items()}
    rows, step = out.flatten(0, 1), max(1, CHUNK // out.shape[2])
    for first in range(0, len(rows), step):
        part = {name: tensor[first : first + step] for name, tensor in held.items()}
        rows[first : first + step] = dequantized(**part, dtype=out.dtype)


def _picked(tensor: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """torch cannot pick rows of float8, but their bytes."""
    held = tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor
    return held.index_select(0, chosen).view(tensor.dtype)
