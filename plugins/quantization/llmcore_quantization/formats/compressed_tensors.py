"""compressed-tensors, as llm-compressor saves it: integers in words, int8, float8, and mxfp4 as plain weights.

- `pack-quantized`: `weight_packed` int32 [outputs, inputs * bits / 32], words along inputs; `weight_scale`
  [outputs, groups]; `weight_zero_point` int32 [outputs * bits / 32, groups], words along outputs, or int8
  [outputs, groups]; `weight_shape` [2]; `weight_g_idx` [inputs]. A field holds a signed number plus half its range.
- `int-quantized`, `float-quantized`: `weight` int8 or e4m3 [outputs, inputs]; `weight_scale` per tensor, output, group
  or block; `input_scale` if the scale of the inputs is static. Integers of 4 bits with quantized inputs are int8, too.
- `mxfp4-pack-quantized`: `weight_packed` u8 [outputs, inputs / 2], `weight_scale` u8 [outputs, inputs / 32].

Source: compressed-tensors 0.20.0, compressors/.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from llmcore.api import ConfigError, ModelConfig

from llmcore_quantization.canonical import Scheme
from llmcore_quantization.checkpoint import CheckpointMethod
from llmcore_quantization.formats import mxfp4
from llmcore_quantization.formats.packed import (
    DECLINED,
    FIX,
    SCALES,
    WORDS,
    Grid,
    Header,
    KVAlone,
    Packed,
    Stored,
    codes,
    dtype_of,
    fields,
    group_order,
    group_size,
    held_as,
    known,
    mapping,
    matrix,
    split,
    static_scale,
    zeros,
)
from llmcore_quantization.targets import in_layers, names, targeted

CODES: Mapping[str, str] = {"I8": "i8", "F8_E4M3": "e4m3"}
"""The dtype of an unpacked weight -> `Scheme.codes`."""

TYPES: Mapping[tuple[str, Any], str | None] = {
    ("int", 4): "u4",
    ("int", 8): "i8",
    ("float", 8): "e4m3",
    ("float", 4): None,
}
"""(type, num_bits) of weights -> `Scheme.codes`; None: mxfp4, which becomes plain."""


def make(quantization: Mapping[str, Any], config: ModelConfig) -> CheckpointMethod:
    """The QuantMethod for one checkpoint. Raises ConfigError for a variant that is not read."""
    kv_alone = quantization.get("kv_cache_scheme") and not quantization.get("config_groups")
    return CheckpointMethod(KVAlone() if kv_alone else CompressedTensors(quantization), config)


@dataclass(frozen=True)
class Group:
    """One of `config_groups`: the modules that it targets, and how they are quantized."""

    name: str
    targets: tuple[str, ...]
    weights: Mapping[str, Any]
    inputs: Mapping[str, Any] | None
    format: str | None

    @property
    def codes(self) -> str | None:
        """`Scheme.codes` of the weights; None for the 4-bit floats of mxfp4."""
        return "i8" if self.format == "int-quantized" else _codes(self.weights)

    @property
    def block(self) -> tuple[int, int]:
        """(outputs, inputs) that share a scale; 0: all. Raises ConfigError."""
        strategy = self.weights.get("strategy")
        if strategy == "block":
            block = self.weights.get("block_structure")
            if not (isinstance(block, list | tuple) and len(block) == 2 and all(isinstance(n, int) for n in block)):
                raise ConfigError(f"block_structure of {self.name} in quantization_config is {block!r}; {FIX}")
            return block[0], block[1]
        return 0 if strategy == "tensor" else 1, group_size(self.weights, "group_size") if strategy == "group" else 0

    @property
    def multiplied(self) -> Any:
        """`Scheme.inputs`. Inputs that are quantized in a way that no scheme has are multiplied as they are."""
        given = self.inputs
        if given is None or _codes(given) != self.codes:
            return "plain"
        if self.weights.get("symmetric") is False or given.get("symmetric") is False:
            return "plain"
        if not given.get("dynamic"):
            return "static" if given.get("strategy", "tensor") == "tensor" else "plain"
        if given.get("strategy") in ("group", "tensor_group"):
            return "group" if given.get("group_size") == self.block[1] else "plain"
        return "row"


def _codes(arguments: Mapping[str, Any]) -> str | None:
    return TYPES.get((arguments.get("type", "int"), arguments.get("num_bits")))


class CompressedTensors:
    """A Format."""

    name = "compressed-tensors"
    leaves = frozenset(
        f"{which}_{what}"
        for which in ("weight", "input", "output")
        for what in ("packed", "scale", "zero_point", "shape", "g_idx", "global_scale")
    ) | {"weight"}
    early = frozenset({"weight_shape", "weight_g_idx"})
    split = staticmethod(split)

    def __init__(self, quantization: Mapping[str, Any]) -> None:
        known(self.name, quantization, {"format": FORMATS})
        known("sparsity_config", mapping(quantization, "sparsity_config"), {"format": ("dense",)})
        if mapping(quantization, "transform_config").get("config_groups"):
            raise ConfigError(
                "transform_config in quantization_config rotates the inputs of linears, which is not computed; use a "
                "checkpoint without transforms"
            )
        groups = mapping(quantization, "config_groups")
        self._groups = [_group(name, mapping(groups, name), quantization.get("format")) for name in groups]
        if not self._groups:
            raise ConfigError(f"quantization_config of {self.name} has no config_groups; {FIX}")
        self._ignored = names(quantization, "ignore")

    def scheme(self, module: str) -> Scheme | None:
        """The scheme by config alone."""
        group = None if targeted(module, self._ignored) else self._group_of(module)
        if group is None or group.codes is None or not (in_layers(module) or module == "lm_head"):
            return None
        weights: Any = group.codes
        actorder = group.weights.get("actorder") in ("group", "dynamic", True)
        zeros = group.weights.get("symmetric") is False
        return Scheme(
            codes=weights, group=group.block[1], scale="bf16", zeros=zeros, ordered=actorder, inputs=group.multiplied
        )

    def _group_of(self, module: str) -> Group | None:
        """The group that names the module, else the first that names its class."""
        close = {group.name: targeted(module, group.targets) for group in self._groups}
        best = max(self._groups, key=lambda group: close[group.name])
        return best if close[best.name] else None

    def packed(self, module: str, headers: Mapping[str, Header], early: Mapping[str, torch.Tensor]) -> Packed | None:
        """The module, from its headers, its shape, and the group of each of its inputs."""
        if "weight_packed" not in headers and dtype_of(headers, "weight") not in CODES:
            return None
        if {"weight", "weight_packed"} <= headers.keys():
            raise ConfigError(f"{module} has both weight and weight_packed; download the weights again")
        if "weight_global_scale" in headers:
            raise ConfigError(f"{module} is quantized as nvfp4, and {DECLINED['nvfp4']}; use another checkpoint")
        if (group := self._group_of(module)) is None:
            raise ConfigError(
                f"{module} is quantized, and no targets of config_groups in quantization_config name it; {FIX}"
            )
        if dtype_of(headers, "weight_packed") == "U8":
            return mxfp4.packed(module, headers, "weight_packed", "weight_scale")
        return _packed(module, headers, early, group)


FORMATS = (
    *("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mxfp4-pack-quantized"),
    *("mixed-precision", "dense"),
)
"""Values of `format`. The headers say which of them a module has."""


def _group(name: str, group: Mapping[str, Any], format: str | None) -> Group:
    """`format`: that of groups without one. Raises ConfigError for weights that are not read."""
    weights = mapping(group, "weights")
    kind, bits = weights.get("type", "int"), weights.get("num_bits")
    known(f"compressed-tensors' {name}", group, {"format": FORMATS})
    if (kind, bits) not in TYPES:
        raise ConfigError(
            f"{name} in quantization_config has weights of type {kind!r} with num_bits {bits!r}; this format is "
            "read with int of 4 or 8 bits and float of 8, and mxfp4; use another checkpoint of the model"
        )
    known(f"compressed-tensors' {name}", weights, {"strategy": ("tensor", "channel", "group", "block")})
    inputs, own = mapping(group, "input_activations") or None, group.get("format") or format
    return Group(name, names(group, "targets"), weights, inputs, own)


def _packed(module: str, headers: Mapping[str, Header], early: Mapping[str, torch.Tensor], group: Group) -> Packed:
    """A module of integers in words, of int8 or of float8."""
    in_words = "weight_packed" in headers
    bits = group.weights["num_bits"] if in_words else 8
    outputs, wide = matrix(module, headers, "weight_packed" if in_words else "weight")
    inputs = _inputs(module, early.get("weight_shape"), outputs, wide, bits) if in_words else wide
    of = WORDS[bits] if in_words else CODES[dtype_of(headers, "weight")]
    if of != group.codes:
        raise ConfigError(
            f"{module} is quantized as {of}, and {group.name} in quantization_config says {group.codes}; {FIX}"
        )
    rows, columns = group.block
    grid = Grid(outputs, inputs, rows or outputs, columns or inputs)
    order = None
    g_idx = early.get("weight_g_idx")
    if g_idx is not None and not (g_idx < 0).all():  # all -1 if the inputs were not sorted
        order = group_order(g_idx, grid.columns, f"{module}.weight_g_idx")
    tensors = {
        "codes": Stored("weight_packed", ((outputs, wide),), ("I32",), partial(_words, bits=bits, inputs=inputs))
        if in_words
        else Stored("weight", ((outputs, wide),), tuple(CODES), torch.Tensor.contiguous),
        "scale": Stored("weight_scale", grid.shapes, tuple(SCALES), grid.spread),
    }
    if asymmetric := group.weights.get("symmetric") is False:
        tensors["zero"] = _zero(module, grid, bits, dtype_of(headers, "weight_zero_point"))
    if (multiplied := group.multiplied) == "static":
        tensors["input_scale"] = static_scale("input_scale")
    scale = dtype_of(headers, "weight_scale")
    scheme = grid.scheme(
        of,
        scale,
        zeros=asymmetric,
        ordered=order is not None,
        inputs=multiplied,
    )
    return Packed(outputs=outputs, inputs=inputs, cell=grid.cell, scheme=scheme, tensors=tensors, order=order)


def _words(words: torch.Tensor, bits: int, inputs: int) -> torch.Tensor:
    return codes(fields(words, bits)[:, :inputs], bits)


def _inputs(module: str, shape: torch.Tensor | None, outputs: int, wide: int, bits: int) -> int:
    """The inputs of a weight in words, of which the last word of a row may have unused fields."""
    most = wide * 32 // bits
    if shape is None:
        return most
    stored = shape.long().tolist()
    if len(stored) != 2 or stored[0] != outputs or -(-stored[1] * bits // 32) != wide:
        raise ConfigError(
            f"{module}.weight_shape is {stored}; {module}.weight_packed has {outputs} outputs and room for {most} "
            f"inputs of {bits} bits; {FIX}"
        )
    inputs: int = stored[1]
    return inputs


def _zero(module: str, grid: Grid, bits: int, dtype: str) -> Stored:
    """`weight_zero_point`, in words along the outputs or one int8 each."""
    high, wide = grid.shape
    if dtype == "I8":
        name = f"{module}.weight_zero_point"
        return Stored("weight_zero_point", grid.shapes, ("I8",), partial(_signed_zeros, name, grid, bits))
    shape = (-(-high * bits // 32), wide)
    return Stored("weight_zero_point", (shape,), ("I32",), partial(_word_zeros, grid, bits))


def _word_zeros(grid: Grid, bits: int, words: torch.Tensor) -> torch.Tensor:
    return grid.spread(zeros(fields(words.t(), bits)[:, : grid.shape[0]].t(), bits, grid.inputs))


def _signed_zeros(name: str, grid: Grid, bits: int, found: torch.Tensor) -> torch.Tensor:
    if bits == 4 and ((found < -8) | (found > 7)).any():
        raise ConfigError(f"{name} has zero points from {found.min()} to {found.max()}; 4 bits have -8 to 7; {FIX}")
    return grid.spread(found if held_as(bits, grid.inputs) == "i8" else (found + 8).to(torch.uint8))
