"""The ops of quantized linears, and the ops that write their quantized inputs. Here is what their modules share.

The shape of a linear has `inputs`, `outputs`, `bias`, and of the Scheme `codes`, `group` (0: all inputs of a row share
a scale), `scale`, `zeros` and `ordered`. A linear with an activation has `size` instead of `outputs`, half of them.

The shape of an op that writes quantized rows has `size`, the elements of a row; `codes`, "i8" or "e4m3"; and `group`,
the elements that share a scale (0: all of a row).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import prod
from typing import Any

import torch
from llmcore.api import OpContext
from llmcore.ops import Op, Shape, draw, draws_on, size

from llmcore_quantization.canonical import CODES, Scheme, shapes
from llmcore_quantization.rounding import codes_of, quantized

Samples = Iterator[tuple[torch.Tensor | None, ...]]

Rows = tuple[torch.Tensor, torch.Tensor]
"""Quantized rows: (codes [T, size], scale [T, size / group] f32)."""

TOLD = ("codes", "group", "scale", "zeros", "ordered")
"""The fields of a Scheme that the shape of an op has."""

LONG = {0: 1, 1: 13, 2: 50, 3: 256}
"""Token counts of long samples by bucket; the last bucket has 4,096."""


def shape_of(scheme: Scheme, inputs: int, outputs: int, bias: bool, activation: str | None = None) -> dict[str, Any]:
    """The shape of a linear's op, or of its composite with an activation that halves the outputs."""
    rows = {"outputs": outputs} if activation is None else {"size": outputs // 2}
    return {"inputs": inputs, **rows, "bias": bias, **{name: getattr(scheme, name) for name in TOLD}}


def scheme_of(shape: Shape) -> Scheme:
    """The scheme of the weight that a shape describes."""
    told: Any = {name: shape[name] for name in TOLD}
    return Scheme(**told)


def outputs_of(shape: Shape) -> int:
    """The outputs of the linear, before its activation."""
    return size(shape, "outputs") if "outputs" in shape else 2 * size(shape, "size")


def sizes(context: OpContext) -> tuple[int, int]:
    """(inputs, outputs) of the linear of the context's shape."""
    return size(context.shape, "inputs"), outputs_of(context.shape)


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


def coded(context: OpContext, x: torch.Tensor) -> Rows:
    """Inputs [T, K] as a linear takes them: (codes, scale)."""
    return codes_of(uneven(x), CODES[str(context.shape["codes"])], size(context.shape, "group"))


def moved(shape: Shape, scheme: Scheme) -> tuple[float, float]:
    """(bytes, flops): codes and scales are read once as they are packed, inputs are read and outputs written once."""
    tokens, inputs, outputs = size(shape, "tokens"), size(shape, "inputs"), outputs_of(shape)
    element, written = size(shape, "element", 2), size(shape, "outputs") if "outputs" in shape else outputs // 2
    row = inputs * element if scheme.inputs == "plain" else inputs + 4 * inputs // (scheme.group or inputs)
    held = sum(prod(dims) * dtype.itemsize for dims, dtype in shapes(scheme, inputs, outputs).values())
    return held + tokens * float(row + written * element), 2.0 * tokens * inputs * outputs


ROUNDED: dict[str, float] = {"f32": 8e-3, "f16": 8e-3, "bf16": 2e-2}
"""The tolerance of quantized rows, as `distance` measures them: one code apart, and two in bf16, where the largest
value of a row may differ in its last bit. Then all codes shift. Scales may differ by the same share."""


def distance(got: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...]) -> Iterator[Any]:
    """(what, got, expected): codes by their place on the grid, scales as shares of the expected ones, the rest as is.

    The steps of float8 grow with its values, so that two neighbours near the largest one differ by a fourteenth of it.
    """
    (codes, scale, *rest), (right, steps, *others) = got, expected
    yield "codes", _places(codes), _places(right)
    yield "scale", scale.to(steps.device) / steps, torch.ones_like(steps)
    for one, other in zip(rest, others, strict=True):
        yield "output", one, other


def _places(codes: torch.Tensor) -> torch.Tensor:
    """The place of each code on the grid, counted from 0. NaN has none."""
    if codes.dtype == torch.int8:
        return codes
    bits = codes.view(torch.uint8).int()
    places = torch.where(bits > 127, 128 - bits, bits).float()
    return places.masked_fill(codes.float().isnan(), torch.nan)


def quantizer(context: OpContext, part: Callable[..., Op] | None = None) -> Callable[[torch.Tensor], Rows]:
    """x [T, size] -> quantized rows in the form of the context's shape, by the chosen kernel of `quantize_rows`.

    `part`: as `expand` gets it; None: torch.
    """
    shape = context.shape
    if part is None:
        kind, group = CODES[str(shape["codes"])], size(shape, "group")
        return lambda x: codes_of(x, kind, group)
    quantize = part("quantize_rows", static=False, **shape)
    return lambda x: quantize(x, None)


def in_forms(odd: int, groups: int) -> tuple[Shape, ...]:
    """Shapes of ops that write quantized rows: of `odd` elements with one scale, of `groups` with one for each 128."""
    rows = [{"size": odd, "codes": codes, "group": 0} for codes in ("i8", "e4m3")]
    return *rows, {"size": groups, "codes": "e4m3", "group": 128}
