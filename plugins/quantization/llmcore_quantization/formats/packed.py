"""The common part of all formats: one quantized module, and how its tensors become canonical ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import gcd
from typing import Any, Protocol

import torch
from llmcore.api import ConfigError

from llmcore_quantization.canonical import ScaleType, Scheme, dequantized, packed, shapes, unpacked

Header = tuple[tuple[int, ...], str]
"""(shape, safetensors' name of the dtype)."""

SCALES: Mapping[str, ScaleType] = {"F16": "f16", "BF16": "bf16", "F32": "f32", "F8_E8M0": "f32"}
"""The dtype of stored scales -> the dtype in which they are held."""

HALF_OR_SINGLE = ("F16", "BF16", "F32")

LEAST = 32
"""The smallest group that is held packed if the checkpoint's groups do not divide the inputs."""

FIX = "correct quantization_config in config.json if it is wrong, else download the weights again"


@dataclass(frozen=True)
class Stored:
    """A tensor of a quantized module: what its header has to say, and how it becomes a canonical tensor."""

    leaf: str
    """The last component of its name."""
    shapes: tuple[tuple[int, ...], ...]
    """The shapes that it may have."""
    dtypes: tuple[str, ...]
    convert: Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Packed:
    """A quantized module of a checkpoint: a weight [outputs, inputs]."""

    outputs: int
    inputs: int
    cell: tuple[int, int]
    """(outputs, inputs) that share a scale, by the quantization_config."""
    scheme: Scheme | None
    """None: the weight has no canonical form and is always read as a plain one."""
    tensors: Mapping[str, Stored]
    """Canonical tensor -> the stored tensor from which it is made. `order` is not among them."""
    order: torch.Tensor | None = None
    """int32 [inputs], if the groups are of inputs in another order."""
    checked: tuple[Stored, ...] = ()
    """Tensors that have no canonical form. Their `convert` raises ConfigError for wrong values."""
    dequantize: Callable[..., torch.Tensor] = dequantized
    """(codes, scale, zero, order, dtype), by name -> the plain weight [outputs, inputs]."""
    experts: int = 0
    """Not 0: a stack. Its plain weight is [experts, inputs, outputs / experts] and has the module's own name."""

    def shapes(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """(shape, dtype) of the canonical tensors, {} without a scheme."""
        return {} if self.scheme is None else shapes(self.scheme, self.inputs, self.outputs)

    def scales(self) -> frozenset[str]:
        """The leaves that the plain weight is made of beside its codes."""
        return frozenset(stored.leaf for name, stored in self.tensors.items() if name in ("scale", "zero"))

    def plain_name(self, module: str) -> str:
        """The name of the plain weight."""
        return module if self.experts else f"{module}.weight"

    @property
    def plain_shape(self) -> tuple[int, ...]:
        """The shape of the plain weight."""
        matrix = (self.outputs, self.inputs)
        return (self.experts, self.inputs, self.outputs // self.experts) if self.experts else matrix

    def plain(self, weight: torch.Tensor) -> torch.Tensor:
        """weight [outputs, inputs] -> `plain_shape`."""
        return weight.view(self.experts, -1, self.inputs).transpose(1, 2) if self.experts else weight

    def check_values(self, leaf: str, read: Callable[[], torch.Tensor]) -> None:
        """Read the tensor if it is among those to be checked. Raises ConfigError for wrong values."""
        for stored in self.checked:
            if stored.leaf == leaf:
                stored.convert(read())

    def check(self, module: str, headers: Mapping[str, Header]) -> None:
        """Raise ConfigError if a tensor is missing, or has another shape or dtype than it should."""
        static = self.scheme is not None and self.scheme.inputs == "static"
        needed = [stored for name, stored in self.tensors.items() if static or name != "input_scale"]
        for stored in (*needed, *self.checked):
            name, wanted = f"{module}.{stored.leaf}", " or ".join(str(list(shape)) for shape in stored.shapes)
            if stored.leaf not in headers:
                raise ConfigError(f"the checkpoint lacks {name} {wanted}, without which {module} is not read; {FIX}")
            shape, dtype = headers[stored.leaf]
            if shape not in stored.shapes or dtype not in stored.dtypes:
                raise ConfigError(
                    f"{name} is {dtype} {list(shape)}, and for {self.outputs} outputs and {self.inputs} inputs, of "
                    f"which {self.cell[0]} x {self.cell[1]} share a scale, it has to be {' or '.join(stored.dtypes)} "
                    f"{wanted}; {FIX}"
                )


class Format(Protocol):
    """A checkpoint format under one quantization_config."""

    name: str
    leaves: frozenset[str]
    """Last components of the names of the tensors that quantized modules have, without their bias."""
    early: frozenset[str]
    """Those whose few numbers decide about the others, so that they are read first."""

    def split(self, tensor: str) -> tuple[str, str]:
        """A tensor's name as its module and its leaf."""

    def packed(self, module: str, headers: Mapping[str, Header], early: Mapping[str, torch.Tensor]) -> Packed | None:
        """The module, from its headers and its `early` tensors by leaf; None if it is plain. Raises ConfigError."""

    def scheme(self, module: str) -> Scheme | None:
        """The likely scheme of a module of which only the config is known; None if it is plain."""


def matrix(module: str, headers: Mapping[str, Header], leaf: str) -> tuple[int, int]:
    """The shape of the tensor that holds the codes of a module. Raises ConfigError if it is not there or no matrix."""
    if leaf not in headers:
        raise ConfigError(f"the checkpoint lacks {module}.{leaf}, and has other tensors of that module; {FIX}")
    shape, dtype = headers[leaf]
    if len(shape) != 2:
        raise ConfigError(f"{module}.{leaf} is {dtype} {list(shape)} and has to be a matrix; {FIX}")
    return shape[0], shape[1]


def dtype_of(headers: Mapping[str, Header], leaf: str) -> str:
    """The stored dtype of a tensor, "" if it is not there."""
    return headers.get(leaf, ((), ""))[1]


def split(tensor: str) -> tuple[str, str]:
    """`Format.split` for tensors that are named module.leaf."""
    module, _, leaf = tensor.rpartition(".")
    return module, leaf


class KVAlone:
    """A Format of plain weights under a quantization_config that quantizes KV alone."""

    name = "kv"
    leaves: frozenset[str] = frozenset()
    early: frozenset[str] = frozenset()
    split = staticmethod(split)

    def packed(self, module: str, headers: Mapping[str, Header], early: Mapping[str, torch.Tensor]) -> None:
        """None: every module is plain."""

    def scheme(self, module: str) -> None:
        """None."""


@dataclass(frozen=True)
class Grid:
    """The blocks of `rows` x `columns` of a weight [outputs, inputs] that share a scale.

    The last blocks may extend beyond the weight. Groups are blocks of one row.
    """

    outputs: int
    inputs: int
    rows: int
    columns: int

    @property
    def cell(self) -> tuple[int, int]:
        """(outputs, inputs) that share a scale."""
        return self.rows, self.columns

    @property
    def shape(self) -> tuple[int, int]:
        """The number of blocks along each side."""
        return -(-self.outputs // self.rows), -(-self.inputs // self.columns)

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shapes in which scales are stored: a single column or a single block may lack its dimension."""
        high, wide = self.shape
        return (self.shape, *([(high,)] if wide == 1 else []), *([()] if high == wide == 1 else []))

    @property
    def group(self) -> int:
        """Inputs per canonical group: the most that divide the inputs and do not cross a border of blocks."""
        return gcd(self.columns, self.inputs)

    @property
    def canonical(self) -> bool:
        """False if the canonical groups would be so small that the scales outweigh the codes."""
        return self.inputs % self.columns == 0 or self.group >= LEAST

    def scheme(self, codes: Any, scale: str, **more: Any) -> Scheme | None:
        """The scheme of a weight with such blocks, None if it has none. `scale`: the stored dtype."""
        return self.held(Scheme(codes=codes, scale=SCALES.get(scale, "f32"), **more))

    def held(self, scheme: Scheme) -> Scheme | None:
        """`scheme` with the groups that it has here, and with 8 bits if a row of 4 would end within a byte."""
        group = 0 if self.group == self.inputs and scheme.inputs != "group" else self.group
        codes = "i8" if scheme.codes == "u4" and self.inputs % 2 else scheme.codes
        return replace(scheme, codes=codes, group=group) if self.canonical else None

    def spread(self, cells: torch.Tensor) -> torch.Tensor:
        """One value per block, in a shape of `shapes` -> [outputs, inputs / group]."""
        if cells.dtype == torch.float8_e8m0fnu:
            cells = power(cells.view(torch.uint8))
        cells = cells.reshape(self.shape).repeat_interleave(self.rows, 0)[: self.outputs]
        first = torch.arange(0, self.inputs, self.group, device=cells.device)
        return cells[:, first // self.columns]

    def spread_from_rows(self, cells: torch.Tensor) -> torch.Tensor:
        """`spread` of cells that are stored inputs first, [blocks of inputs, outputs]."""
        return self.spread(cells.t())


BIAS = 127


def power(exponents: torch.Tensor) -> torch.Tensor:
    """The powers of two f32 that the bytes of float8 e8m0 stand for. Not every device converts that type."""
    return torch.exp2(exponents.float() - BIAS)


def static_scale(leaf: str) -> Stored:
    """The scale of a linear's inputs, which the checkpoint brings."""
    return Stored(leaf, ((), (1,)), HALF_OR_SINGLE, _single)


def _single(scale: torch.Tensor) -> torch.Tensor:
    return scale.reshape(1).float()


def fields(words: torch.Tensor, bits: int) -> torch.Tensor:
    """int32 [..., W] -> u8 [..., W * 32 / bits]: the fields of the words, the lowest bits first."""
    held = words.contiguous().view(torch.uint8)
    return unpacked(held) if bits == 4 else held


WORDS: Mapping[int, Any] = {4: "u4", 8: "i8"}
"""Bits of a field of an int32 word -> `Scheme.codes`, if a row fills whole bytes."""


def held_as(bits: int, inputs: int) -> Any:
    """`Scheme.codes` for fields of `bits`. Rows of 4 bits that end within a byte are held in 8."""
    return WORDS[bits] if inputs * bits % 8 == 0 else "i8"


def codes(values: torch.Tensor, bits: int) -> torch.Tensor:
    """u8 fields [outputs, inputs] -> canonical codes."""
    return packed(values) if held_as(bits, values.shape[1]) == "u4" else centred(values, bits)


def zeros(values: torch.Tensor, bits: int, inputs: int) -> torch.Tensor:
    """u8 fields -> canonical zeros of a weight with `inputs`."""
    return values if held_as(bits, inputs) == "u4" else centred(values, bits)


def centred(values: torch.Tensor, bits: int) -> torch.Tensor:
    """u8 fields -> int8, where the middle of their range is 0."""
    return (values ^ 128).view(torch.int8) if bits == 8 else values.view(torch.int8) - 8


def group_order(g_idx: torch.Tensor, columns: int, name: str) -> torch.Tensor | None:
    """The order [inputs] int32 that sorts inputs by their group; None if they are sorted already.

    Raises ConfigError if the groups are not of `columns` inputs each, of which the last may have fewer.
    """
    wanted = torch.arange(len(g_idx), device=g_idx.device) // columns
    if torch.equal(g_idx.long(), wanted):
        return None
    found, order = g_idx.long().sort(stable=True)
    if not torch.equal(found, wanted):
        raise ConfigError(f"{name} does not put {columns} inputs into each of the groups 0 to {wanted[-1]}; {FIX}")
    return order.int()


DECLINED: Mapping[str, str] = {
    "nvfp4": "its float8 scales of 16 inputs under a second scale have no canonical form here",
    "gemv": "its words are ordered for one CUDA kernel",
    "marlin": "its words are ordered for one CUDA kernel",
    "exllama": "its words are ordered for one CUDA kernel",
    "bitblas": "its words are ordered for one CUDA kernel",
    "sparse": "sparse weights are not computed",
    "bits ": "no op multiplies codes of that width",
    "w_bit ": "no op multiplies codes of that width",
}
"""A part of "key value" in a quantization_config that is declined -> the reason."""


def known(format: str, quantization: Mapping[str, Any], values: Mapping[str, tuple[Any, ...]]) -> None:
    """Raise ConfigError if a value in quantization_config is not among those that the format's reader knows."""
    for key, allowed in values.items():
        value = quantization.get(key)
        found = value.lower() if isinstance(value, str) else value
        if value is not None and not any(found == one and type(found) is type(one) for one in allowed):
            why = next((why for what, why in DECLINED.items() if what in f"{key} {value}".lower()), "")
            raise ConfigError(
                f"{key} in quantization_config is {value!r}{why and f', and {why}'}; {format} is read with "
                f"{' or '.join(map(str, allowed))}; use another checkpoint of the model"
            )


def mapping(quantization: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """The object at `key`, {} without one. Raises ConfigError for another value."""
    value = quantization.get(key)
    if value is not None and not isinstance(value, Mapping):
        raise ConfigError(f"{key} in quantization_config is {value!r} and has to be an object; correct config.json")
    return value or {}


def group_size(quantization: Mapping[str, Any], *keys: str) -> int:
    """The inputs per group, 0 for whole rows, which configs spell as -1 or None. Raises ConfigError."""
    key = next((key for key in keys if key in quantization), keys[0])
    size = quantization.get(key)
    if size in (None, -1):
        return 0
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise ConfigError(f"{key} in quantization_config is {size!r}; it has to be a number of inputs, or -1 for all")
    return size
