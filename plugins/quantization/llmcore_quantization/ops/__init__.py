"""The ops of quantized linears. Here is what their modules share: the shape of a scheme, its tensors, and their bytes.

The shape of each op has `inputs`, `outputs`, `bias`, and of the Scheme `codes`, `group` (0: all inputs of a row share
a scale), `scale`, `zeros` and `ordered`; `static`: the inputs have a scale of the checkpoint's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import prod
from typing import Any

import torch
from llmcore.api import OpContext
from llmcore.ops import Op, Shape, draw, draws_on, size

from llmcore_quantization.canonical import Scheme, shapes
from llmcore_quantization.rounding import quantized

Samples = Iterator[tuple[torch.Tensor | None, ...]]

TOLD = ("codes", "group", "scale", "zeros", "ordered")
"""The fields of a Scheme that the shape of an op has."""

LONG = {0: 1, 1: 13, 2: 50, 3: 256}
"""Token counts of long samples by bucket; the last bucket has 4,096."""


def shape_of(scheme: Scheme, inputs: int, outputs: int, bias: bool) -> dict[str, Any]:
    """The shape of a linear's op."""
    told = {name: getattr(scheme, name) for name in TOLD}
    return {"inputs": inputs, "outputs": outputs, "bias": bias, **told, "static": scheme.inputs == "static"}


def scheme_of(shape: Shape) -> Scheme:
    """The scheme of the weight that a shape describes."""
    told: Any = {name: shape[name] for name in TOLD}
    return Scheme(**told)


def sizes(context: OpContext) -> tuple[int, int]:
    """(inputs, outputs) of the context's shape."""
    return size(context.shape, "inputs"), size(context.shape, "outputs")


def plain(context: OpContext, part: Callable[..., Op]) -> Op:
    """The chosen kernel of `linear` for the dequantized weight."""
    inputs, outputs = sizes(context)
    return part("linear", inputs=inputs, outputs=outputs, bias=context.shape["bias"])


def weight(context: OpContext, scheme: Scheme, rows: int = 1) -> dict[str, torch.Tensor]:
    """The tensors of a drawn weight, with an output whose weights are all 0."""
    inputs, outputs = sizes(context)
    drawn = draw(context, outputs, inputs, seed=1)
    drawn[-1] = 0.0
    found = quantized(drawn, scheme, rows)
    if scheme.ordered:
        generator = torch.Generator().manual_seed(3)
        found["order"] = torch.randperm(inputs, generator=generator, dtype=torch.int32).to(draws_on())
    return found


def bias(context: OpContext) -> torch.Tensor | None:
    """A drawn bias, if the context's shape has one."""
    return draw(context, sizes(context)[1], seed=2) if context.shape["bias"] else None


def long(context: OpContext) -> torch.Tensor:
    """Inputs of a token count near the upper end of the bucket."""
    return draw(context, LONG.get(context.bucket, 4096), sizes(context)[0])


def uneven(x: torch.Tensor) -> torch.Tensor:
    """Inputs [T, K] with a token of zeros if there are several, and one input that is far larger than the others."""
    x = x.clone()
    x[0, 1] = 50.0
    x[1:2] = 0.0
    return x


def moved(shape: Shape, scheme: Scheme) -> tuple[float, float]:
    """(bytes, flops): codes and scales are read once as they are packed, inputs are read and outputs written once."""
    tokens, inputs, outputs = (size(shape, name) for name in ("tokens", "inputs", "outputs"))
    held = sum(prod(dims) * dtype.itemsize for dims, dtype in shapes(scheme, inputs, outputs).values())
    return held + tokens * (inputs + outputs) * float(size(shape, "element", 2)), 2.0 * tokens * inputs * outputs
