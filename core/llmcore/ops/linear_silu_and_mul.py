"""linear_silu_and_mul, a composite: the first linear of a gated MLP and its activation.

A kernel may pack its weight, as kernels of `linear` may (see llmcore.ops.linear). The expansion packs if its linear
does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from llmcore.api.specs import OpContext
from llmcore.ops import SAMPLE_TOKENS, Op, Shape, draw, linear, silu_and_mul, size

TOLERANCE: Mapping[str, float] = {"f32": 5e-5, "f16": 8e-3, "bf16": 3e-2}
"""The sum of the tolerances of the two parts."""

SHAPES: tuple[Shape, ...] = ({"inputs": 72, "size": 51, "bias": True}, {"inputs": 128, "size": 64, "bias": False})
"""Sizes that no tile divides, and sizes that many tiles divide."""


def reference(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [T, inputs], weight [2 size, inputs] (the gate's rows first), bias [2 size] or None -> [T, size]."""
    return silu_and_mul.reference(linear.reference(x, weight, bias))


class Expanded:
    """The chosen kernels of the linear and the activation. It has `packing` and `pack` if the linear has them."""

    def __init__(self, linear: Op, activation: Op) -> None:
        self._linear, self._activation = linear, activation
        self.packing: str | None = getattr(linear, "packing", None)
        self.pack: Callable[..., Any] | None = getattr(linear, "pack", None)

    def __call__(self, x: torch.Tensor, *weight: torch.Tensor | None) -> Any:
        """The activation of the linear's result. `weight`: what the linear takes after its inputs."""
        return self._activation(self._linear(x, *weight))


def expand(context: OpContext, part: Callable[..., Op]) -> Op:
    """One linear for gate and up, then silu_and_mul."""
    shape = context.shape
    outputs = 2 * size(shape, "size")
    chosen = part("linear", inputs=shape["inputs"], outputs=outputs, bias=shape.get("bias", False))
    return Expanded(chosen, part("silu_and_mul", size=shape["size"]))


def samples(context: OpContext) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]]:
    """With a bias if the shape has one, and with gates of both signs so large that exp overflows."""
    inputs, outputs = size(context.shape, "inputs", 72), 2 * size(context.shape, "size", 51)
    weight = draw(context, outputs, inputs, seed=1) / 8
    bias = draw(context, outputs, seed=2) if context.shape.get("bias", True) else None
    for tokens in SAMPLE_TOKENS[context.bucket]:
        x = draw(context, tokens, inputs)
        yield x, weight, bias
        yield x * 100, weight, bias


def cost(shape: Shape) -> tuple[float, float]:
    """(bytes, flops): the weight is read once, inputs are read and outputs written once."""
    tokens, inputs, width = (size(shape, name) for name in ("tokens", "inputs", "size"))
    elements = 2 * inputs * width + tokens * (inputs + width)
    return float(elements * size(shape, "element", 2)), 4.0 * tokens * inputs * width + 5.0 * tokens * width
