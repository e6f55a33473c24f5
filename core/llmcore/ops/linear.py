"""linear: x W^T + b.

A kernel may be an object with `packing`, the name of its own weight layout, and `pack(weight)`, which makes a weight
in that layout. If the kernels of all token buckets have the same packing, the layer keeps only the packed weight.
Otherwise, and for a head that shares the embedding's table, kernels get the plain weight. So each must take both.

Kernels of quantized linears may pack too. The parameters of `pack` have the names of the op's arguments that it
replaces, such as `pack(codes, scale, zero, order)`; absent ones are None. It returns as many, in that order.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from llmcore.api.specs import OpContext
from llmcore.ops import SAMPLE_TOKENS, Shape, draw, size

TOLERANCE = {"f32": 2e-5, "f16": 5e-3, "bf16": 2e-2}


def reference(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [T, inputs], weight [outputs, inputs], bias [outputs] or None -> [T, outputs]."""
    return F.linear(x, weight, bias)


def samples(context: OpContext) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]]:
    """With and without bias, in sizes that no tile divides."""
    inputs, outputs = size(context.shape, "inputs", 72), size(context.shape, "outputs", 51)
    weight, bias = draw(context, outputs, inputs, seed=1), draw(context, outputs, seed=2)
    for tokens in SAMPLE_TOKENS[context.bucket]:
        x = draw(context, tokens, inputs)
        yield x, weight, None
        yield x, weight, bias


def long_samples(context: OpContext) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]]:
    """A token count near the upper end of the bucket."""
    inputs, outputs = size(context.shape, "inputs", 72), size(context.shape, "outputs", 51)
    # A head (many outputs) computes only the sampled rows of a step.
    tokens = {0: 1, 1: 13, 2: 50, 3: 256}.get(context.bucket, 4096 if outputs < 1 << 16 else 300)
    yield draw(context, tokens, inputs), draw(context, outputs, inputs, seed=1), None


def cost(shape: Shape) -> tuple[float, float]:
    """(bytes, flops): the weight is read once, inputs are read and outputs written once."""
    tokens, inputs, outputs = (size(shape, name) for name in ("tokens", "inputs", "outputs"))
    elements = inputs * outputs + tokens * (inputs + outputs)
    return float(elements * size(shape, "element", 2)), 2.0 * tokens * inputs * outputs
