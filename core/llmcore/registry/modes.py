"""The pins of `--mode` and `--kernel`, which hold before kernels are resolved. A mode is data: a bundle of pins."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from llmcore.api.errors import ConfigError, did_you_mean
from llmcore.api.models import KVGroupSpec
from llmcore.api.specs import DeviceInfo, KernelSpec, KVLayoutSpec, ModeSpec, OpSpec, QuantMethodSpec
from llmcore.config import Config, parse_pin
from llmcore.registry.registry import Registry
from llmcore.registry.resolve import REFERENCE, device_misfit


@dataclass(frozen=True)
class Pins:
    """The choices of modes and `--kernel`, which hold before kernels are resolved.

    `kernels`: op -> kernel name. `layouts`: the layout of a model's KV group -> the one that stores the group instead.
    `quant_options`: what the modes choose for the method `quant`.
    """

    kernels: Mapping[str, str] = field(default_factory=dict)
    layouts: Mapping[str, str] = field(default_factory=dict)
    quant: str | None = None
    quant_options: Mapping[str, int | str | bool] = field(default_factory=dict)

    def stored(self, group: KVGroupSpec) -> KVGroupSpec:
        """A model's KV group with the layout that stores it."""
        return replace(group, layout=self.layouts.get(group.layout, group.layout))


def chosen_modes(config: Config, registry: Registry) -> tuple[str, ...]:
    """The names of `--mode`, and the modes that options of plugins ask for."""
    options = config.plugin_options
    more = sorted(
        mode.name
        for mode, _ in registry.specs(ModeSpec)
        if any(all(options.get(name) in values for name, values in asks.items()) for asks in mode.asked)
    )
    return tuple(dict.fromkeys((*config.kernels.mode, *more)))


def apply_modes(
    names: Sequence[str],
    registry: Registry,
    device: DeviceInfo,
    kernels: Sequence[str] = (),
) -> Pins:
    """The pins of `--mode` names and `--kernel op=name` values together.

    Raises ConfigError for a mode that does not exist or does not fit the device; the error lists those that fit. A
    malformed or unknown pin, and two pins that contradict each other, raise it too. `engine.blueprint.Blueprint` also
    checks whether a mode fits a model.
    """
    pinned: dict[tuple[str, str], tuple[Any, str]] = {}

    def pin(what: tuple[str, str], value: Any, source: str) -> None:
        other, owner = pinned.setdefault(what, (value, source))
        if other != value:
            raise ConfigError(
                f"{owner} pins {' '.join(what).rstrip()} to {other!r}, {source} to {value!r}; give one of them"
            )

    for op, kernel in map(parse_pin, kernels):
        registry.find(OpSpec, op)
        pin(("kernel", op), kernel, f"--kernel {op}={kernel}")
    for name in names:
        mode = check_mode(name, registry, device.type, lambda mode: mode_misfit(mode, registry, device))
        bundle: dict[tuple[str, str], Any] = {("kernel", op): kernel for op, kernel in mode.kernels.items()}
        bundle |= {("layout", declared): layout for declared, layout in mode.layouts.items()}
        bundle |= {("quant option", option): value for option, value in mode.quant_options.items()}
        bundle |= {("quant", ""): mode.quant} if mode.quant is not None else {}
        for what, value in bundle.items():
            pin(what, value, f"--mode {name}")
    chosen: dict[str, dict[str, Any]] = {"kernel": {}, "layout": {}, "quant": {}, "quant option": {}}
    for (kind, key), (value, _) in pinned.items():
        chosen[kind][key] = value
    pins = Pins(chosen["kernel"], chosen["layout"], chosen["quant"].get(""), chosen["quant option"])
    if pins.quant_options and pins.quant is None:
        option = next(iter(pins.quant_options))
        quantizing = sorted(mode.name for mode in modes_with(pins.quant_options, registry))
        raise ConfigError(
            f"{pinned['quant option', option][1]} chooses the {option} of a mode that quantizes weights, and no such "
            f"mode is given; give one beside it: {', '.join(quantizing) or 'no plugin brings any'}"
        )
    return pins


def modes_with(options: Collection[str], registry: Registry) -> list[ModeSpec]:
    """The modes with a quantization method for which other modes may choose all of `options`."""
    methods = {spec.name for spec, _ in registry.specs(QuantMethodSpec) if spec.options.issuperset(options)}
    return [mode for mode, _ in registry.specs(ModeSpec) if mode.quant in methods]


def mode_misfit(
    mode: ModeSpec, registry: Registry, device: DeviceInfo, ops: Collection[str] | None = None
) -> str | None:
    """Why a mode cannot work on `device` for a model that asks for `ops`, or None if it can."""
    layouts = {spec.name for spec, _ in registry.specs(KVLayoutSpec)}
    for layout in mode.layouts.values():
        if layout not in layouts:
            return f"needs layout {layout}, which no plugin brings"
    if mode.quant is not None and mode.quant not in {spec.name for spec, _ in registry.specs(QuantMethodSpec)}:
        return f"needs quantization method {mode.quant}, which no plugin brings"
    known = {spec.name for spec, _ in registry.specs(OpSpec)}
    for op, kernel in mode.kernels.items():
        if op not in known:
            return f"pins {op}, which is an op of no active plugin"
        if ops is not None and op not in ops:
            return f"pins {op}, which this model does not use"
        found = [spec for spec, _ in registry.specs(KernelSpec) if (spec.op, spec.name) == (op, kernel)]
        if not found and kernel != REFERENCE:
            return f"needs kernel {kernel} for {op}, which no plugin brings"
        for spec in found:
            if (misfit := device_misfit(spec.when, device)) is not None:
                return f"kernel {kernel} for {op} {misfit}"
    return None


def joined(modes: Sequence[ModeSpec]) -> ModeSpec:
    """One mode with the pins of several. Where two pin the same, the later one counts."""
    return ModeSpec(
        name=" ".join(mode.name for mode in modes),
        layouts={declared: layout for mode in modes for declared, layout in mode.layouts.items()},
        kernels={op: kernel for mode in modes for op, kernel in mode.kernels.items()},
        quant=next((mode.quant for mode in reversed(modes) if mode.quant is not None), None),
        quant_options={option: value for mode in modes for option, value in mode.quant_options.items()},
    )


def check_mode(name: str, registry: Registry, where: str, misfit: Callable[[ModeSpec], str | None]) -> ModeSpec:
    """The mode called `name`.

    Raises ConfigError for an unknown name, or if `misfit` returns why the mode does not fit `where`. The error lists
    the modes that fit.
    """
    modes = {mode.name: mode for mode, _ in registry.specs(ModeSpec)}
    why = misfit(modes[name]) if name in modes else None
    if name in modes and why is None:
        return modes[name]
    wrong = f" does not fit {where}: {why}" if name in modes else ": there is no such mode"
    fitting = ", ".join(sorted(mode.name for mode in modes.values() if misfit(mode) is None))
    guess = "" if name in modes else did_you_mean(name, modes)
    raise ConfigError(f"{_given(name, modes)}{wrong}; modes that fit: {fitting or 'none, so leave it out'}.{guess}")


def _given(name: str, modes: Mapping[str, ModeSpec]) -> str:
    """How an operator gives a mode: by its name, or by the options that ask for it."""
    asked = modes[name].asked if name in modes else ()
    options = (" ".join(f"--{option} {values[0]}" for option, values in asks.items() if values[0]) for asks in asked)
    return " or ".join((f"--mode {name}", *options))
