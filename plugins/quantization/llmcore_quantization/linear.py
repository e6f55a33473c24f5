"""Linears with quantized weights: the LinearMethod of a Scheme."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from llmcore.api import ConfigError, Placement
from llmcore.layers import Bound, Build, InputForm, LinearShape, Rounded, fill_normal, packed, packing
from torch import nn

from llmcore_quantization.canonical import BLOCK, Scheme, shapes
from llmcore_quantization.modes import GROUPS
from llmcore_quantization.ops import shape_of
from llmcore_quantization.rounding import LIMITS

ARGUMENTS: Mapping[str, tuple[str, ...]] = {
    "linear.w4a16": ("codes", "scale", "zero", "order", "bias"),
    "linear.w8a16": ("codes", "scale", "zero", "order", "bias"),
    "linear.w8a8": ("codes", "scale", "bias"),
    "linear.fp8_block": ("codes", "scale", "bias"),
}
"""Op -> the tensors that it takes after the inputs."""

WHOLE = {"order", "input_scale"}
"""The tensors of all inputs, which have no row per output."""

SPREAD = 0.02
"""The standard deviation of random weights."""


def op_of(scheme: Scheme) -> str:
    """The op that multiplies weights of a scheme. Raises ConfigError if there is none."""
    if scheme.inputs == "plain":
        return "linear.w4a16" if scheme.codes == "u4" else "linear.w8a16"
    if scheme.codes != "u4" and not (scheme.zeros or scheme.ordered):
        if scheme.inputs in ("row", "static") and scheme.group == 0:
            return "linear.w8a8"
        if scheme.inputs == "group" and scheme.group > 0 and scheme.codes == "e4m3":
            return "linear.fp8_block"
    raise ConfigError(f"no op multiplies weights of {scheme}; use the model's unquantized checkpoint")


def multiples(scheme: Scheme) -> tuple[int, int]:
    """Multiples of outputs and of inputs that keep groups and bytes whole."""
    return 1, scheme.group or (2 if scheme.codes == "u4" else 1)


class Quantized:
    """The LinearMethod of linears whose weights are quantized by one scheme.

    Raises ConfigError if no op multiplies such weights.
    """

    def __init__(self, scheme: Scheme) -> None:
        self.scheme, self.op = scheme, op_of(scheme)
        self.multiples = multiples(scheme)
        # With quantized inputs the activation instead writes the form that the next linear takes.
        self.activations = frozenset({"silu_and_mul"} if scheme.inputs == "plain" else ())

    def create(self, shape: LinearShape, build: Build) -> Bound:
        """The canonical tensors of one linear, and its bias.

        Raises ConfigError if the scheme's groups do not divide the inputs, or if inputs in another order are cut over
        ranks.
        """
        return _Tensors(self.scheme, self.op, shape, build)


class Held:
    """The canonical tensors of one linear, or of a stack of experts.

    A tensor of all inputs has a part for each module that the linear stacks.
    """

    def __init__(self, scheme: Scheme, shape: LinearShape, build: Build) -> None:
        self.scheme, self.shape = scheme, shape
        cut = shape.shard is not None and shape.shard.dim == 1 and build.mesh.size(shape.shard.group) > 1
        if scheme.ordered and cut:
            raise ConfigError(
                f"{shape.name} has groups of inputs in another order (desc_act), which cannot be cut over ranks; "
                "serve the model on one rank, or a version of it whose desc_act is false"
            )
        self.held: dict[str, tuple[nn.Parameter, Placement]] = {}
        for name, (size, dtype) in self._sizes().items():
            # A scale of a whole row belongs to all inputs, so a cut of the inputs leaves it whole.
            columns = name == "codes" or scheme.group > 0
            placement = self._whole(size[0]) if name in WHOLE else shape.placement(columns=columns)
            length = size[0] * max(1, len(placement.parts)) if name in WHOLE else size[0]
            data = torch.empty(length, *size[1:], dtype=dtype, device=build.torch_device)
            self.held[name] = nn.Parameter(data, requires_grad=False), placement
        if shape.bias:
            self.held["bias"] = build.empty(shape.outputs), shape.placement(columns=False)

    def _sizes(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        try:
            return shapes(self.scheme, self.shape.inputs, self.shape.outputs)
        except ValueError as error:
            choice = GROUPS if self.scheme.codes == "u4" else ()
            fitting = [str(group) for group in choice if self.shape.inputs % group == 0]
            advice = f"groups of {' or '.join(fitting)} do" if fitting else "use a scale per row instead of groups"
            raise ConfigError(f"{self.shape.name}: {error}; {advice}") from error

    def _whole(self, size: int) -> Placement:
        """Of a tensor of all inputs."""
        parts = {part: (index * size, size) for index, part in enumerate(self.shape.parts)}
        return Placement(parts, by_output=False)

    def tensors(self) -> Mapping[str, tuple[nn.Parameter, Placement]]:
        """The parameters by name, with their Placements."""
        return self.held

    def fill_dummy(self, name: str, tensor: torch.Tensor, generator: torch.Generator) -> None:
        """Codes are uniform, so their bits are random. Weights have a mean of 0 and a deviation of about 0.02.

        If weights had a mean, all outputs of a linear would be alike, and hidden states would say little about tokens.
        """
        codes = self.scheme.codes
        if name == "codes" and codes == "u4" and not self.scheme.zeros:
            tensor.random_(1, 16, generator=generator)  # 8 stands for 0
            tensor += 16 * torch.empty_like(tensor).random_(1, 16, generator=generator)
        elif name == "codes":
            bits = tensor.view(torch.uint8).random_(0, 254 if codes == "e4m3" else 256, generator=generator)
            if codes == "e4m3":
                bits += bits >= 127  # 127 and 255 are NaN
        elif name == "scale":
            # one value would have one rounding error, which groups with a value of their own average out
            same = BLOCK if self.scheme.inputs == "group" else 1
            drawn = tensor[::same].clone().uniform_(0.9, 1.1, generator=generator).mul_(SPREAD / DEVIATIONS[codes])
            tensor.copy_(drawn.repeat_interleave(same, 0)[: len(tensor)])
        elif name == "zero":
            tensor.random_(7, 9, generator=generator) if codes == "u4" else tensor.zero_()
        elif name == "order":
            order = torch.randperm(self.shape.inputs, generator=generator, device=tensor.device)
            tensor.view(-1, self.shape.inputs).copy_(order)
        elif name == "input_scale":
            tensor.fill_(LARGEST / LIMITS[codes])
        else:
            fill_normal(name, tensor, generator)


class _Tensors(Held):
    """layers.Bound."""

    def __init__(self, scheme: Scheme, op: str, shape: LinearShape, build: Build) -> None:
        super().__init__(scheme, shape, build)
        self.op, activation = op, shape.activation
        name = op if activation is None else f"{op}_{activation}"
        self.calls = build.op(name, **shape_of(scheme, shape.inputs, shape.outputs, shape.bias, activation))
        self.takes: InputForm | None = None
        self.quantize: tuple[Any, ...] = ()
        if scheme.inputs != "plain":
            form: dict[str, Any] = {"codes": scheme.codes, "group": scheme.group}
            static = scheme.inputs == "static"
            self.takes = None if static else InputForm(suffix="quant", shape=form)
            self.quantize = build.op("quantize_rows", size=shape.inputs, static=static, **form)

    def bind(self) -> tuple[tuple[Any, ...], frozenset[str]]:
        given = {name: parameter.data for name, (parameter, _) in self.held.items()}
        if "order" in given:
            given["order"] = self._order(given["order"].view(-1, self.shape.inputs))
        arguments = {name: given.get(name) for name in ARGUMENTS[self.op]}
        replaced: frozenset[str] = frozenset()
        if (pack := packing(self.calls)) is not None:
            arguments = packed(pack, arguments)
            replaced = frozenset(name for name in self.held if arguments.get(name, given[name]) is not given[name])
            for name in replaced:
                del self.held[name]
        tensors = tuple(arguments.values())
        if not self.quantize:
            return tuple(partial(_call, call, tensors) for call in self.calls), replaced
        static = given["input_scale"].amax().view(1) if "input_scale" in given else None
        pairs = zip(self.quantize, self.calls, strict=True)
        return tuple(partial(_rounded_call, *pair, static, tensors) for pair in pairs), replaced

    def _order(self, orders: torch.Tensor) -> torch.Tensor:
        """The order of all parts, from [parts, inputs]."""
        if not torch.equal(orders, orders[:1].expand_as(orders)):
            raise ConfigError(
                f"{' and '.join(self.shape.parts)} of {self.shape.name} have groups of inputs in different orders, "
                "and one linear stacks them; use the model's unquantized checkpoint"
            )
        return orders[0]


LARGEST = 16.0
"""The largest input of random linears with a static scale. Normed inputs of real models are seldom larger."""


def _deviation(values: torch.Tensor) -> float:
    return float(values.float().square().mean().sqrt())


_FLOAT8 = torch.tensor([bits for bits in range(256) if bits % 128 != 127], dtype=torch.uint8)

DEVIATIONS = {
    "u4": _deviation(torch.arange(16) - 8),
    "i8": _deviation(torch.arange(256) - 128),
    "e4m3": _deviation(_FLOAT8.view(torch.float8_e4m3fn)),
}
"""The standard deviation of uniform codes."""


def _call(op: Any, arguments: tuple[torch.Tensor | None, ...], x: torch.Tensor) -> torch.Tensor:
    y: torch.Tensor = op(x, *arguments)
    return y


def _rounded_call(
    quantize: Any,
    op: Any,
    static: torch.Tensor | None,
    arguments: tuple[torch.Tensor | None, ...],
    x: torch.Tensor | Rounded,
) -> torch.Tensor:
    rows = x if isinstance(x, Rounded) else quantize(x, static)
    y: torch.Tensor = op(*rows, *arguments)
    return y
