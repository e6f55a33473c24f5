"""linear: x W^T + b, and on top of a residual where one is given.

A kernel may be an object with `packing`, the name of its own arrangement of weights, and `pack(weight)`, which makes
it. Where the kernels of all token buckets share one packing, the layer keeps the packed weight alone; otherwise (and
for a head that shares the embedding's table) kernels get the plain weight, so each must take both.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from llmcore.ops import SAMPLE_TOKENS, Op, Shape, draw, size
from llmcore.specs import OpContext

TOLERANCE = {"f32": 2e-5, "f16": 5e-3, "bf16": 2e-2}


def reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """x [T, inputs], weight [outputs, inputs], bias [outputs] or None, residual [T, outputs] or None -> [T, outputs].

    A kernel may round the sum once, and may write it over `residual`.
    """
    y = F.linear(x, weight, bias)
    return y if residual is None else residual + y


def make(context: OpContext) -> Op:
    """The reference."""
    return reference


Sample = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]


def samples(context: OpContext) -> Iterator[Sample]:
    """With and without bias and residual, sizes that no tile divides."""
    inputs, outputs = size(context.shape, "inputs", 72), size(context.shape, "outputs", 51)
    weight, bias = draw(context, outputs, inputs, seed=1), draw(context, outputs, seed=2)
    for tokens in SAMPLE_TOKENS[context.bucket]:
        x = draw(context, tokens, inputs)
        residual = draw(context, tokens, outputs, seed=3)
        for given in (None, bias):
            yield x, weight, given, None
            yield x, weight, given, residual


def long_samples(context: OpContext) -> Iterator[Sample]:
    """A step's most tokens; with a residual where the outputs are no vocabulary."""
    inputs, outputs = size(context.shape, "inputs", 72), size(context.shape, "outputs", 51)
    # a head is asked for some rows of a step only
    tokens = {0: 1, 1: 13, 2: 50, 3: 256}.get(context.bucket, 4096 if outputs < 1 << 16 else 300)
    x, weight = draw(context, tokens, inputs), draw(context, outputs, inputs, seed=1)
    yield x, weight, None, None
    if outputs < 1 << 16:
        yield x, weight, None, draw(context, tokens, outputs, seed=3)


def cost(shape: Shape) -> tuple[float, float]:
    """The weight is read once, activations once each, and so is a residual where the shape says `residual`."""
    tokens, inputs, outputs = (size(shape, name) for name in ("tokens", "inputs", "outputs"))
    elements = inputs * outputs + tokens * (inputs + (1 + bool(shape.get("residual"))) * outputs)
    return float(elements * size(shape, "element", 2)), 2.0 * tokens * inputs * outputs
