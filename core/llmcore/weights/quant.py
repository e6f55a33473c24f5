"""Choose the quantization method that reads a model's weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from llmcore.api.errors import ConfigError, PluginError
from llmcore.api.models import ModelConfig
from llmcore.api.protocols import Checkpoint, QuantMethod
from llmcore.api.specs import PluginInfo, QuantMethodSpec
from llmcore.registry.loader import load
from llmcore.registry.registry import Registry, either_of, fix_for, known_plugins

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Quantized:
    """The name of the chosen method, and the QuantMethod that it made for this checkpoint."""

    name: str
    method: QuantMethod


def find_quantization(
    registry: Registry,
    hf: Mapping[str, Any],
    config: ModelConfig,
    pin: str | None = None,
    options: Mapping[str, int | str | bool] | None = None,
) -> Quantized | None:
    """The method for a model whose config.json is `hf`; None if its weights are not quantized and stay so.

    `pin`: the method that a mode names. `options`: what modes choose for it, if it quantizes a plain checkpoint.
    Raises ConfigError if no method, or not this one, reads the checkpoint; the error names the methods that do.
    """
    quantization = hf.get("quantization_config") or {}
    if not isinstance(quantization, Mapping):
        raise ConfigError(
            f"quantization_config in the model's config.json is {quantization!r} and has to be an object"
        )
    if pin is not None:
        spec = registry.find(QuantMethodSpec, pin)
        if not quantization and not spec.plain:
            raise ConfigError(
                f"the weights are plain, and the mode's quantization method {pin} needs a checkpoint that is "
                "quantized for it: leave out the mode, or use another checkpoint"
            )
        if quantization and not _reads(spec, quantization):
            who = ", ".join(spec.name for spec, _ in _readers(registry, quantization)) or "nothing installed"
            raise ConfigError(
                f"the weights are quantized with {describe(quantization)}; the mode's quantization method {pin} does "
                f"not read that, {who} does: leave out the mode, or use another checkpoint"
            )
        if quantization and options:
            raise ConfigError(
                f"a mode chooses the {next(iter(options))} of {pin}, but the weights are quantized; leave it out"
            )
        if unknown := [option for option in options or () if option not in spec.options]:
            raise ConfigError(f"the mode's quantization method {pin} has no {unknown[0]} to choose")
    elif quantization:
        spec = _reader(registry, quantization)
    else:
        return None
    return Quantized(spec.name, _make(registry, spec, quantization or options or {}, config))


def unquantized(quantized: Quantized | None, checkpoint: Checkpoint, device: torch.device) -> Checkpoint:
    """The checkpoint with the names and tensors that the model loads. See QuantMethod."""
    return checkpoint if quantized is None else quantized.method.checkpoint(checkpoint, device)


def describe(quantization: Mapping[str, Any]) -> str:
    """A quantization_config in a few words: its method and its short values."""
    name = quantization.get("quant_method")
    short = {k: v for k, v in quantization.items() if k != "quant_method" and v is not None and len(str(v)) <= 20}
    values = ", ".join(f"{key} {value}" for key, value in sorted(short.items())[:6])
    return (repr(name) if name else "a quantization_config without quant_method") + (f" ({values})" if values else "")


def _reads(spec: QuantMethodSpec, quantization: Mapping[str, Any]) -> bool:
    return spec.reads is not None and bool(load(spec.reads)(quantization))


def _readers(registry: Registry, quantization: Mapping[str, Any]) -> list[tuple[QuantMethodSpec, PluginInfo]]:
    return [(spec, plugin) for spec, plugin in registry.specs(QuantMethodSpec) if _reads(spec, quantization)]


def _reader(registry: Registry, quantization: Mapping[str, Any]) -> QuantMethodSpec:
    """The one method that reads `quantization`. Raises ConfigError if there is none, or more than one."""
    found = _readers(registry, quantization)
    if len(found) == 1:
        return found[0][0]
    if found:
        raise ConfigError(
            f"the weights are quantized with {describe(quantization)}, which is read by {either_of(found)}, or give a "
            "mode that pins one"
        )
    name = quantization.get("quant_method")
    if dist := known_plugins().get(str(name)):
        raise ConfigError(
            f"the weights are quantized with {describe(quantization)}, which {dist} reads, and it is not active: "
            f"pip install {dist}, and let --plugins select it"
        )
    known = [spec for spec, _ in registry.specs(QuantMethodSpec) if spec.reads is not None]
    methods = "; ".join(f"{spec.name}: {spec.summary}" for spec in known) or "none"
    raise ConfigError(
        f"the weights are quantized with {describe(quantization)}, for which no plugin brings a method (methods: "
        f"{methods}); install one that does, or use the model's unquantized checkpoint"
    )


def _make(
    registry: Registry, spec: QuantMethodSpec, quantization: Mapping[str, Any], config: ModelConfig
) -> QuantMethod:
    try:
        method: QuantMethod = load(spec.make)(quantization, config)
    except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError) as error:
        owner = next(plugin for other, plugin in registry.specs(QuantMethodSpec) if other is spec)
        raise PluginError(
            f"quantization method {spec.name} of plugin {owner.name!r} failed on {describe(quantization)}: "
            f"{type(error).__name__}: {error}; {fix_for(owner, error)}"
        ) from error
    return method
