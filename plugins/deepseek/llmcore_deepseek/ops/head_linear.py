"""head_linear: multiply each head by its own matrix (a batched product), for latent attention's up-projections."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from llmcore.api import OpContext
from llmcore.ops import SAMPLE_TOKENS, Shape, draw, size

TOLERANCE = {"f32": 2e-5, "f16": 5e-3, "bf16": 2e-2}

SHAPES: tuple[Shape, ...] = ({"heads": 3, "inputs": 16, "outputs": 40}, {"heads": 4, "inputs": 72, "outputs": 32})


def reference(x: torch.Tensor, weight: torch.Tensor, beside: torch.Tensor | None = None) -> torch.Tensor:
    """x [T, heads, inputs], weight [heads, outputs, inputs] of any strides -> [T, heads, outputs].

    With `beside` [T, heads, rest], the result is [T, heads, outputs + rest]: `beside` follows each head's outputs.
    """
    y = torch.bmm(x.transpose(0, 1), weight.transpose(1, 2)).transpose(0, 1)
    return y if beside is None else torch.cat((y, beside), -1)


def samples(context: OpContext) -> Iterator[tuple[torch.Tensor, ...]]:
    """A contiguous weight, and a weight that is a transposed part of a larger one.

    Also queries that are a part of wider heads, with the rest of these heads as `beside`.
    """
    heads, inputs, outputs = (size(context.shape, name, default) for name, default in _DEFAULTS)
    for tokens in SAMPLE_TOKENS[context.bucket]:
        wide = draw(context, tokens, heads, inputs + 8)
        both = draw(context, heads, inputs + 24, outputs, seed=1) / 8
        up = both[:, :inputs].transpose(1, 2)
        yield wide[..., :inputs], up, wide[..., inputs:]
        yield wide[..., :inputs], up
        yield wide[..., :inputs].contiguous(), draw(context, heads, outputs, inputs, seed=2) / 8


_DEFAULTS = (("heads", 3), ("inputs", 16), ("outputs", 40))


def cost(shape: Shape) -> tuple[float, float]:
    """(bytes, flops): the weight is read once, inputs are read and outputs written once."""
    tokens, heads, inputs, outputs = (size(shape, name) for name in ("tokens", "heads", "inputs", "outputs"))
    elements = heads * (inputs * outputs + tokens * (inputs + outputs))
    return float(elements * size(shape, "element", 2)), 2.0 * tokens * heads * inputs * outputs
