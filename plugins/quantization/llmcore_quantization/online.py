"""Quantize a plain checkpoint while it loads: the QuantMethods that modes pin.

Only the linears and the experts of decoder layers are quantized. The embedding, norms, the head and routers stay
plain, and so do experts that the checkpoint has stacked.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from math import prod
from typing import Any

import torch
from llmcore.api import Checkpoint, ConfigError, ModelConfig

from llmcore_quantization.canonical import BLOCK, Scheme, shapes
from llmcore_quantization.checkpoint import DTYPE_NAMES
from llmcore_quantization.experts import QuantizedExperts
from llmcore_quantization.linear import Quantized
from llmcore_quantization.modes import GROUP
from llmcore_quantization.rounding import quantized

logger = logging.getLogger(__name__)

ROUTERS = frozenset({"gate", "router", "shared_expert_gate"})
"""Last names of modules whose few outputs choose or weigh experts."""

SMALL = 1_000_000_000
"""Models with fewer parameters lose much in 4 bits."""


@dataclass(frozen=True)
class Recipe:
    """The way in which a method quantizes.

    `rows`: neighbouring outputs that share their scales. `plain`: last name of a linear -> the entry of config.json
    that lists the layers in which it stays plain. It stays plain in all layers for "", and without that entry. Such
    linears lose most by rounded inputs. The inputs of experts are not rounded, so their linears are not among them.
    """

    scheme: Scheme
    rows: int = 1
    plain: Mapping[str, str] = field(default_factory=dict)


class Online:
    """A protocols.QuantMethod for plain checkpoints.

    `options`: what modes choose for the recipe's scheme.
    """

    def __init__(self, recipe: Recipe, options: Mapping[str, Any], config: ModelConfig) -> None:
        self._recipe = replace(recipe, scheme=replace(recipe.scheme, **options))
        self._config: dict[str, Any] = {}
        self._sizes: Mapping[str, tuple[tuple[int, ...], str]] = {}
        self._modules: set[str] = set()

    def checkpoint(self, checkpoint: Checkpoint, device: torch.device) -> Checkpoint:
        """The checkpoint whose modules are quantized on `device`, those for which `method_for` has a method."""
        self._config, self._sizes = checkpoint.config(), checkpoint.sizes()
        for key in filter(None, self._recipe.plain.values()):
            layers = self._config.get(key, [])
            if not isinstance(layers, list) or not all(isinstance(layer, int) for layer in layers):
                raise ConfigError(f"{key} in config.json is {layers!r} and has to be a list of the numbers of layers")
        return OnlineCheckpoint(checkpoint, self._recipe, self._modules, device)

    def method_for(self, modules: Sequence[str]) -> Quantized | None:
        """The LinearMethod of a linear in a decoder layer; None if one of its modules stays plain."""
        if not all(map(self._fits, modules)) or any(map(self._spared, modules)):
            return None
        self._modules.update(modules)
        return Quantized(self._recipe.scheme)

    def expert_method(self, modules: Sequence[str]) -> QuantizedExperts | None:
        """The ExpertMethod of experts in a decoder layer."""
        if not all(map(self._fits, modules)):
            return None
        self._modules.update(modules)
        return QuantizedExperts(self._recipe.scheme)

    def _fits(self, module: str) -> bool:
        """True for a matrix in a decoder layer, except a router."""
        shape, _ = self._sizes.get(f"{module}.weight", ((0, 0), ""))
        return _layer(module) is not None and len(shape) == 2 and module.rpartition(".")[2] not in ROUTERS

    def _spared(self, module: str) -> bool:
        """True for a linear that the recipe leaves plain."""
        entry = self._recipe.plain.get(module.rpartition(".")[2])
        if entry is None:
            return False
        listed = self._config.get(entry)
        return listed is None or _layer(module) in listed


def _layer(module: str) -> int | None:
    return next((int(part) for part in module.split(".") if part.isdecimal()), None)


class OnlineCheckpoint:
    """A protocols.Checkpoint with the canonical tensors of some modules instead of their plain weights.

    `modules`: their names; it may grow until `sizes` is called. One weight at a time is on the device.
    """

    def __init__(self, inner: Checkpoint, recipe: Recipe, modules: Collection[str], device: torch.device) -> None:
        self._inner, self._recipe, self._modules, self._device = inner, recipe, modules, device

    def config(self) -> dict[str, Any]:
        """The content of config.json."""
        return self._inner.config()

    def generation_config(self) -> dict[str, Any]:
        """The content of generation_config.json, or {} without that file."""
        return self._inner.generation_config()

    def sizes(self) -> Mapping[str, tuple[tuple[int, ...], str]]:
        """(shape, dtype) by tensor name."""
        found: dict[str, tuple[tuple[int, ...], str]] = {}
        for name, stored in self._inner.sizes().items():
            if (module := self._module(name)) is None:
                found[name] = stored
                continue
            for leaf, (shape, dtype) in self._leaves(name, stored[0]).items():
                found[f"{module}.{leaf}"] = shape, DTYPE_NAMES[dtype]
        return found

    def tensors(self) -> Iterator[tuple[str, Callable[[], torch.Tensor]]]:
        """Each tensor's name with a function that reads it. The function works until the caller asks for the next."""
        stored = self._inner.sizes()
        parameters = sum(prod(shape) for shape, _ in stored.values())
        if self._recipe.scheme.codes == "u4" and parameters < SMALL:
            logger.warning(
                "The model has %d million parameters. Rounding to 4 bits costs models below 1 billion much of their "
                "quality; a mode with 8 bits costs little.",
                parameters // 1_000_000,
            )
        for name, read in self._inner.tensors():
            if (module := self._module(name)) is None:
                yield name, read
                continue
            made = cache(partial(self._quantized, read))
            for leaf in self._leaves(name, stored[name][0]):
                yield f"{module}.{leaf}", partial(_leaf, made, leaf)
            del made  # so that its tensors are free before the next weight is read

    def _module(self, name: str) -> str | None:
        """The module that tensor `name` is the weight of, if it is quantized."""
        module, _, leaf = name.rpartition(".")
        return module if leaf == "weight" and module in self._modules else None

    def _leaves(self, name: str, shape: tuple[int, ...]) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        outputs, inputs = shape
        try:
            return shapes(self._recipe.scheme, inputs, outputs)
        except ValueError as error:
            raise ConfigError(f"{name} is {list(shape)} and cannot be quantized: {error}") from error

    def _quantized(self, read: Callable[[], torch.Tensor]) -> dict[str, torch.Tensor]:
        return quantized(read().to(self._device), self._recipe.scheme, self._recipe.rows)


def _leaf(made: Callable[[], dict[str, torch.Tensor]], leaf: str) -> torch.Tensor:
    return made()[leaf]


def _recipe(scheme: Scheme, **more: Any) -> Callable[[Mapping[str, Any], ModelConfig], Online]:
    return partial(Online, Recipe(scheme, **more))


_INT8 = Scheme(codes="i8", scale="f32", inputs="row")

w4a16 = _recipe(Scheme(codes="u4", group=GROUP, zeros=True))
w4a16_symmetric = _recipe(Scheme(codes="u4", group=GROUP))
w8a16 = _recipe(Scheme(codes="i8", scale="f32"))
w8a8 = _recipe(_INT8)
w8a8_plain_o = _recipe(_INT8, plain={"o_proj": ""})
w8a8_mixdown = _recipe(_INT8, plain={"o_proj": "", "down_proj": "mixdown"})
fp8w8a8 = _recipe(Scheme(codes="e4m3", scale="f32", inputs="row"))
fp8w8a8_b128 = _recipe(Scheme(codes="e4m3", group=128, scale="f32", inputs="group"), rows=BLOCK)
