"""moe.experts.w4a16, a composite: moe.experts whose weights have codes of 4 bits. Inputs are not rounded.

A stack of weights is (codes [experts, rows, inputs / 2], scale [experts, rows, inputs / group], zero of the scale's
shape or None), canonical for each expert. The shape has the fields of moe.experts, and of the Scheme `codes`, `group`
(0: all inputs of a row share a scale) and `zeros`; `scale_type` is its `scale`.

Without a kernel of its own it dequantizes some experts at a time, first those that its tokens chose, and the kernel of
`moe.experts` multiplies them. All mixtures of a model dequantize into the same memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from math import prod
from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.nn.functional as F
from llmcore.api import OpContext
from llmcore.layers import Dispatched
from llmcore.ops import Op, Shape, moe_experts, size

from llmcore_quantization.canonical import Scheme, dequantized, shapes
from llmcore_quantization.rounding import quantized

Stack = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]
"""codes, scale and zero of all experts."""

TOLERANCE = moe_experts.TOLERANCE
IN_PLACE = moe_experts.IN_PLACE

STACKS = ("gate_up", "down")
"""The arguments that are stacks of weights."""

SIZES = ("experts", "top_k", "size", "inner")

_SIZES = tuple(dict(zip(SIZES, sizes, strict=True)) for sizes in ((6, 2, 96, 32), (2, 2, 256, 128), (1, 1, 64, 64)))


def told(scheme: Scheme) -> dict[str, Any]:
    """The fields of a shape that describe a scheme."""
    return {"codes": scheme.codes, "group": scheme.group, "zeros": scheme.zeros, "scale_type": scheme.scale}


def scheme_of(shape: Shape) -> Scheme:
    """The scheme that a shape describes."""
    given: Any = {"codes": shape["codes"], "group": shape["group"], "zeros": shape["zeros"]}
    return Scheme(**given, scale=shape["scale_type"])  # type: ignore[arg-type]


def shapes_of(*schemes: Scheme) -> tuple[Shape, ...]:
    """A shape for each scheme."""
    return tuple({**sizes, **told(scheme)} for sizes, scheme in zip(_SIZES, schemes, strict=True))


SHAPES = shapes_of(
    Scheme(codes="u4", group=32, zeros=True),
    Scheme(codes="u4", group=128, scale="bf16"),
    Scheme(codes="u4", scale="f32"),
)
"""Groups with zeros, blocks of several groups, and a scale per row of a single expert."""


class Experts:
    """The reference: all experts are dequantized."""

    def __init__(self, context: OpContext) -> None:
        self._plain = moe_experts.make(context)

    def __call__(
        self, tokens: Dispatched, gate_up: Stack, down: Stack, into: torch.Tensor | None = None
    ) -> torch.Tensor:
        """As moe.experts: -> [N top_k, size], the result of each pair at its own place."""
        kind = tokens.x.dtype
        return self._plain(tokens, plain(gate_up, kind), plain(down, kind), into)


make = Experts


def plain(stack: Stack, dtype: torch.dtype) -> torch.Tensor:
    """The weights [experts, rows, inputs] of a stack."""
    codes, scale, zero = (None if tensor is None else tensor.flatten(0, 1) for tensor in stack)
    assert codes is not None and scale is not None
    return dequantized(codes, scale, zero, dtype=dtype).view(len(stack[0]), -1, codes.shape[1] * inputs_of(codes))


def inputs_of(codes: torch.Tensor) -> int:
    """The inputs that a canonical code byte holds."""
    return 2 if codes.dtype == torch.uint8 else 1


AT_A_TIME = 1 << 27
"""The most weights that are dequantized at a time, unless one expert has more: 256 MiB in a half type."""

CHUNK = 1 << 23
"""Number of weights dequantized by one call, so that its intermediate results stay small."""

_scratch: WeakValueDictionary[object, torch.Tensor] = WeakValueDictionary()
"""The memory for dequantized weights, by stack, shape, type and device. The ops that use it keep it alive.

The experts of Mixtral-8x7B have 176 million weights each, so it takes 352 MB in a half type; all eight of a layer
would take 2.8 GB.
"""


class Dequantizing:
    """The expansion. Its memory is held between steps, so that kernels find weights at addresses that they know."""

    def __init__(self, context: OpContext, op: Op, some: int) -> None:
        self._op, self._some, self._top_k = op, some, size(context.shape, "top_k")
        self._held: dict[object, torch.Tensor] = {}

    def __call__(
        self, tokens: Dispatched, gate_up: Stack, down: Stack, into: torch.Tensor | None = None
    ) -> torch.Tensor:
        """As the op. All shapes follow from the number of tokens, so that it can be captured."""
        counts, x = tokens.starts.diff(), tokens.x
        # Experts with tokens come first, and at most one for each pair has any.
        order = (counts == 0).to(torch.uint8).argsort(stable=True)
        starts = tokens.starts[0] + F.pad(counts[order].cumsum(0, dtype=torch.int32), (1, 0))
        y = x.new_empty(len(x) * self._top_k, x.shape[1]) if into is None else into
        both, last = self._memory("gate_up", gate_up, x), self._memory("down", down, x)
        for first in range(0, min(len(tokens.pairs), len(counts)), self._some):
            borders = starts[first : first + self._some + 1]
            if borders.is_cpu and borders[0] == borders[-1]:
                break  # a device that runs behind the host would make it wait for such an answer
            chosen = order[first : first + self._some]
            _dequantize(gate_up, chosen, both)
            _dequantize(down, chosen, last)
            self._op(replace(tokens, starts=borders), both, last, y)
        return y

    def _memory(self, leaf: str, stack: Stack, x: torch.Tensor) -> torch.Tensor:
        """The memory for plain weights of some experts, with any content."""
        codes = stack[0]
        key = leaf, (self._some, codes.shape[1], codes.shape[2] * inputs_of(codes)), x.dtype, x.device
        if key not in self._held:
            found = _scratch.get(key)
            self._held[key] = torch.empty(key[1], dtype=x.dtype, device=x.device) if found is None else found
            _scratch[key] = self._held[key]
        return self._held[key]


def _dequantize(stack: Stack, chosen: torch.Tensor, out: torch.Tensor) -> None:
    """Write the plain weights of the `chosen` experts [E] int64 to `out` [E, rows, inputs]."""
    held = [None if tensor is None else _picked(tensor, chosen).flatten(0, 1) for tensor in stack]
    rows, step = out.flatten(0, 1), max(1, CHUNK // out.shape[2])
    for first in range(0, len(rows), step):
        codes, scale, zero = (None if tensor is None else tensor[first : first + step] for tensor in held)
        assert codes is not None and scale is not None
        rows[first : first + step] = dequantized(codes, scale, zero, dtype=out.dtype)


def _picked(tensor: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """torch cannot pick rows of float8, but their bytes."""
    held = tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor
    return held.index_select(0, chosen).view(tensor.dtype)


def _at_a_time(experts: int, weights: int) -> int:
    """The number of experts, with `weights` weights each, that are dequantized together. It divides their number."""
    return max((n for n in range(1, experts + 1) if experts % n == 0 and n * weights <= AT_A_TIME), default=1)


def expand(context: OpContext, part: Callable[..., Op]) -> Op:
    """The chosen `moe.experts` with some dequantized experts at a time."""
    experts, top_k, width, inner = (size(context.shape, name) for name in SIZES)
    some = _at_a_time(experts, 3 * width * inner)
    return Dequantizing(context, part("moe.experts", experts=some, top_k=top_k, size=width, inner=inner), some)


def stacks(context: OpContext) -> tuple[Stack, Stack]:
    """gate_up and down of drawn weights."""
    gate_up, down = (_stack(weight, scheme_of(context.shape)) for weight in moe_experts.weights(context))
    return gate_up, down


def _stack(weight: torch.Tensor, scheme: Scheme) -> Stack:
    found = quantized(weight.flatten(0, 1), scheme)
    stacked = {name: tensor.view(*weight.shape[:2], -1) for name, tensor in found.items()}
    return stacked["codes"], stacked["scale"], stacked.get("zero")


def samples(context: OpContext) -> Iterator[tuple[Dispatched, Stack, Stack, torch.Tensor | None]]:
    """As those of moe.experts."""
    gate_up, down = stacks(context)
    for tokens, _, _, into in moe_experts.samples(context):
        yield tokens, gate_up, down, into


def cost(shape: Shape) -> tuple[float, float]:
    """(bytes, flops): each expert with tokens is read once, with codes as they are packed."""
    experts, _, width, inner = (size(shape, name) for name in SIZES)
    element = size(shape, "element", 2)
    moved, flops = moe_experts.cost(shape)
    touched = (moved - moe_experts.cost({**shape, "touched": 0})[0]) / (3 * inner * width * element)
    held = _bytes(shape, width, 2 * inner) + _bytes(shape, inner, width)
    return moved + min(touched, experts) * (held - 3 * inner * width * element), flops


def _bytes(shape: Shape, inputs: int, outputs: int) -> int:
    """Bytes of one expert's linear."""
    return sum(prod(dims) * dtype.itemsize for dims, dtype in shapes(scheme_of(shape), inputs, outputs).values())
