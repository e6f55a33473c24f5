"""The QuantMethod of checkpoints that are quantized already, and the checkpoint that it makes of them.

A module for which `method_for` gave a method keeps its codes, in canonical form. All others become plain weights in
the model's dtype, so that every checkpoint can be loaded, whichever parts of its model take quantized weights.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from llmcore.api import Checkpoint, ConfigError, ModelConfig
from llmcore.layers import DTYPES, Bound, BoundExperts, Build, ExpertShape, LinearShape, PlainExperts, Unquantized

from llmcore_quantization import canonical
from llmcore_quantization.canonical import Scheme
from llmcore_quantization.experts import QuantizedExperts
from llmcore_quantization.formats.packed import Format, Grid, Header, Packed
from llmcore_quantization.linear import Quantized, op_of

logger = logging.getLogger(__name__)

DTYPE_NAMES: Mapping[torch.dtype, str] = {
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int32: "I32",
    torch.float8_e4m3fn: "F8_E4M3",
}
"""torch's dtype -> the name that safetensors gives it."""

KV_SCALES = frozenset({"k_scale", "v_scale", "q_scale", "kv_scale", "k_zero_point", "v_zero_point", "prob_scale"})
"""Leaves that are constants of the KV cache or of attention, and parameters of no linear."""

CHUNK = 1 << 22
"""Number of weights dequantized at a time, so that their f32 form stays small."""


class CheckpointMethod:
    """A protocols.QuantMethod for checkpoints in one format."""

    def __init__(self, format: Format, config: ModelConfig) -> None:
        self._format, self._dtype = format, DTYPES[config.dtype]
        self._checkpoint: QuantizedCheckpoint | None = None

    def checkpoint(self, checkpoint: Checkpoint, device: torch.device) -> QuantizedCheckpoint:
        """The checkpoint with the tensors that the model takes, which are made on `device`.

        Raises ConfigError if it contradicts its quantization_config.
        """
        self._checkpoint = QuantizedCheckpoint(checkpoint, self._format, self._dtype, device)
        return self._checkpoint

    def method_for(self, modules: Sequence[str]) -> Stored | None:
        """The LinearMethod of a linear that stacks the checkpoint's `modules`; None for plain weights.

        Modules that are stacked keep their codes only if they have one scheme, and one order of inputs.
        """
        checkpoint = self._checkpoint
        assert checkpoint is not None, "checkpoint() comes first"
        scheme_of = checkpoint.scheme if checkpoint.packed else self._format.scheme
        scheme, *others = {_with_op(scheme_of(module)) for module in modules}
        if others or scheme is None or not checkpoint.keep(modules):
            return None
        return Stored(scheme, {module: checkpoint.packed[module].inputs for module in modules if checkpoint.packed})

    def expert_method(self, modules: Sequence[str]) -> QuantizedExperts | None:
        """The ExpertMethod of experts whose modules all have one scheme; None for plain weights.

        Groups of inputs in another order (desc_act) differ by expert, so such experts become plain.
        """
        checkpoint = self._checkpoint
        assert checkpoint is not None, "checkpoint() comes first"
        scheme_of = checkpoint.scheme if checkpoint.packed else self._format.scheme
        scheme, *others = {scheme_of(module) for module in modules}
        if others or scheme is None or scheme.ordered:
            return None
        method = QuantizedExperts(scheme) if checkpoint.packed else DrawnExperts(scheme)
        checkpoint.keep_as(modules, method.scheme)
        return method


class Stored(Quantized):
    """The LinearMethod of modules of a checkpoint.

    `inputs`: module -> their number; {} if only the config is known. Then it holds what a reader would probably make.
    """

    def __init__(self, scheme: Scheme, inputs: Mapping[str, int]) -> None:
        super().__init__(scheme)
        self._inputs = inputs

    def create(self, shape: LinearShape, build: Build) -> Bound:
        """As that of Quantized. If groups do not divide the inputs because config.json is wrong, the error says so."""
        if not self._inputs:
            scheme = _likely(self.scheme, shape, build)
            return (Unquantized() if scheme is None else Quantized(scheme)).create(shape, build)
        whole = _whole(shape, build)
        wrong = next((module for module, inputs in self._inputs.items() if inputs != whole), None)
        try:
            return super().create(shape, build)
        except ConfigError as error:
            if wrong is None:
                raise
            raise ConfigError(
                f"{wrong} has {self._inputs[wrong]} inputs in the checkpoint, and {whole} by config.json; download "
                "the config.json that belongs to the weights"
            ) from error


class DrawnExperts(QuantizedExperts):
    """The ExpertMethod of experts of which only the config is known. It holds what a reader would probably make."""

    def create(self, shape: ExpertShape, build: Build) -> BoundExperts:
        """As that of QuantizedExperts. Plain weights, if the groups would differ or have no canonical form."""
        scheme, *others = {_likely(self.scheme, stack, build) for stack in shape.stacks.values()}
        method = PlainExperts() if others or scheme is None else QuantizedExperts(scheme)
        return method.create(shape, build)


def _whole(shape: LinearShape, build: Build) -> int:
    """The inputs of a linear on all ranks."""
    shard = shape.shard
    return shape.inputs * (build.mesh.size(shard.group) if shard is not None and shard.dim == 1 else 1)


def _likely(scheme: Scheme, shape: LinearShape, build: Build) -> Scheme | None:
    """The scheme in which a reader would hold the weight of a linear; None if it would become plain."""
    whole = _whole(shape, build)
    return Grid(shape.outputs, whole, 1, scheme.group or whole).held(scheme)


def _with_op(scheme: Scheme | None) -> Scheme | None:
    """The scheme, with inputs as they are if no op quantizes inputs for such weights."""
    if scheme is None:
        return None
    try:
        op_of(scheme)
    except ConfigError:
        return replace(scheme, inputs="plain")
    return scheme


class QuantizedCheckpoint:
    """A protocols.Checkpoint over another one whose weights are quantized.

    The constructor reads headers, and of the tensors only the few numbers that decide about others. Raises ConfigError
    if they contradict the quantization_config.
    """

    def __init__(self, inner: Checkpoint, format: Format, dtype: torch.dtype, device: torch.device) -> None:
        self._inner, self._format, self._dtype, self._device = inner, format, dtype, device
        stored: dict[str, dict[str, Header]] = defaultdict(dict)
        for name, header in inner.sizes().items():
            module, leaf = format.split(name)
            if leaf in format.leaves:
                stored[module][leaf] = header
        early = self._read(lambda module, leaf: leaf in format.early)
        self.packed: dict[str, Packed] = {}
        """The quantized modules by name."""
        self._kept: set[str] = set()
        for module, headers in stored.items():
            if (packed := format.packed(module, headers, early.get(module, {}))) is not None:
                self.packed[module] = replace(packed, scheme=_with_op(packed.scheme))
                self.packed[module].check(module, headers)
        if inner.sizes() and format.leaves and not self.packed:
            raise ConfigError(
                f"config.json says that weights are quantized with {format.name!r}, and no tensor is; remove its "
                "quantization_config if they were dequantized, else download the weights again"
            )

    def scheme(self, module: str) -> Scheme | None:
        """The scheme in which the codes of a module can be held; None if it is plain."""
        return self.packed[module].scheme if module in self.packed else None

    def keep(self, modules: Sequence[str]) -> bool:
        """Keep the codes of modules that one linear stacks. False, if the orders of their inputs differ."""
        found = (self.packed[module].order for module in modules if module in self.packed)
        orders = [order for order in found if order is not None]
        if any(not torch.equal(order, orders[0]) for order in orders):
            return False
        self._kept.update(modules)
        return True

    def keep_as(self, modules: Sequence[str], scheme: Scheme) -> None:
        """Keep the codes of modules with the tensors of `scheme`."""
        self.packed |= {m: replace(self.packed[m], scheme=scheme) for m in modules if m in self.packed}
        self._kept.update(modules)

    def config(self) -> dict[str, Any]:
        """The content of config.json."""
        return self._inner.config()

    def generation_config(self) -> dict[str, Any]:
        """The content of generation_config.json, or {} without that file."""
        return self._inner.generation_config()

    def sizes(self) -> Mapping[str, tuple[tuple[int, ...], str]]:
        """(shape, dtype) by tensor name: canonical tensors of modules whose codes are kept, else plain weights."""
        inner = self._inner.sizes().items()
        found = {name: header for name, header in inner if self._passes(*self._format.split(name))}
        for module, packed in self.packed.items():
            if module in self._kept:
                held = packed.shapes().items()
                found |= {f"{module}.{leaf}": (shape, DTYPE_NAMES[dtype]) for leaf, (shape, dtype) in held}
            else:
                found[packed.plain_name(module)] = packed.plain_shape, DTYPE_NAMES[self._dtype]
        return found

    def tensors(self) -> Iterator[tuple[str, Callable[[], torch.Tensor]]]:
        """Each tensor's name with a function that makes it. The function works until the caller asks for the next.

        Scales of weights that become plain are read first, because they may lie behind their codes or in another file.
        """
        plain = {module: packed.scales() for module, packed in self.packed.items() if module not in self._kept}
        logger.info("%d of %d quantized modules become plain weights", len(plain), len(self.packed))
        scales = self._read(lambda module, leaf: leaf in plain.get(module, ()))
        for name, read in self._inner.tensors():
            module, leaf = self._format.split(name)
            if self._passes(module, leaf):
                yield name, read
            elif (packed := self.packed.get(module)) is not None:
                packed.check_values(leaf, read)
                if module in self._kept:
                    yield from self._canonical(module, leaf, read)
                elif leaf == packed.tensors["codes"].leaf:
                    yield packed.plain_name(module), partial(self._plain, module, read, scales.pop(module))

    def _passes(self, module: str, leaf: str) -> bool:
        """True for a tensor that the model takes as it is."""
        return leaf not in KV_SCALES and not (leaf in self._format.leaves and module in self.packed)

    def _read(self, wanted: Callable[[str, str], bool]) -> dict[str, dict[str, torch.Tensor]]:
        """Module -> leaf -> tensor, for those that are `wanted`."""
        found: dict[str, dict[str, torch.Tensor]] = defaultdict(dict)
        for name, read in self._inner.tensors():
            module, leaf = self._format.split(name)
            if wanted(module, leaf):
                found[module][leaf] = read().clone()
        return found

    def _canonical(
        self, module: str, leaf: str, read: Callable[[], torch.Tensor]
    ) -> Iterator[tuple[str, Callable[[], torch.Tensor]]]:
        packed = self.packed[module]
        for name in packed.shapes():
            if name == "order" and packed.order is not None and leaf == packed.tensors["codes"].leaf:
                yield f"{module}.order", packed.order.clone
            elif name != "order" and leaf == packed.tensors[name].leaf:
                yield f"{module}.{name}", partial(self._made, module, name, read)

    def _made(self, module: str, name: str, read: Callable[[], torch.Tensor]) -> torch.Tensor:
        """One canonical tensor, with its inputs sorted by their groups. Raises ConfigError for an impossible scale."""
        packed = self.packed[module]
        made = packed.tensors[name].convert(read().to(self._device))
        stored = f"{module}.{packed.tensors[name].leaf}"
        if name.endswith("scale") and not made.isfinite().all():
            raise ConfigError(f"{stored} has numbers that are not finite; download the weights again")
        if name == "input_scale" and made <= 0:
            raise ConfigError(f"{stored} is {float(made)} and has to be above 0; download the weights again")
        if name == "codes" and packed.order is not None:
            order = packed.order.to(self._device)
            four = made.dtype == torch.uint8
            values = (canonical.unpacked(made) if four else made).index_select(1, order)
            return canonical.packed(values) if four else values
        return made.contiguous()

    def _plain(
        self, module: str, read: Callable[[], torch.Tensor], scales: Mapping[str, torch.Tensor]
    ) -> torch.Tensor:
        """The plain weight, in the type in which the model computes."""
        packed = self.packed[module]
        made = {
            name: self._made(module, name, partial(scales.__getitem__, stored.leaf))
            for name, stored in packed.tensors.items()
            if stored.leaf in scales
        }
        made["codes"] = self._made(module, "codes", read)
        order = None if packed.order is None else packed.order.to(self._device)
        out = torch.empty(packed.outputs, packed.inputs, dtype=self._dtype, device=self._device)
        step = max(1, CHUNK // max(1, packed.inputs))
        for first in range(0, packed.outputs, step):
            rows = {name: tensor[first : first + step] for name, tensor in made.items()}
            out[first : first + step] = packed.dequantize(**rows, order=order, dtype=self._dtype)
        return packed.plain(out)
