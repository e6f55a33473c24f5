"""What `--mode` and `--kernel` settle before anything is resolved. A mode is data: a bundle of pins."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from llmcore.config import parse_pin
from llmcore.errors import ConfigError, did_you_mean
from llmcore.registry import Registry
from llmcore.resolve import REFERENCE, device_misfit
from llmcore.specs import DeviceInfo, KernelSpec, KVLayoutSpec, ModeSpec, OpSpec, QuantMethodSpec


@dataclass(frozen=True)
class Pins:
    """What modes and `--kernel` settle before anything is resolved. `kernels`: op -> kernel name."""

    kernels: Mapping[str, str] = field(default_factory=dict)
    layout: str | None = None
    quant: str | None = None


def apply_modes(
    names: Sequence[str],
    registry: Registry,
    device: DeviceInfo,
    kernels: Sequence[str] = (),
    ops: Collection[str] | None = None,
) -> Pins:
    """The pins of `--mode` names and `--kernel op=name` values together.

    `ops`: what the model asks for, where that is known. Raises ConfigError for a mode that does not exist or fit
    (listing those that do), for a malformed or unknown pin, and where two of them pin different things.
    """
    pinned: dict[tuple[str, str], tuple[str, str]] = {}

    def pin(kind: str, what: str, value: str, source: str) -> None:
        other, owner = pinned.setdefault((kind, what), (value, source))
        if other != value:
            label = f"{kind} {what}".strip()
            raise ConfigError(f"{owner} pins {label} to {other!r}, {source} to {value!r}; give one of them")

    for op, kernel in map(parse_pin, kernels):
        registry.find(OpSpec, op)
        pin("kernel", op, kernel, f"--kernel {op}={kernel}")
    for name in names:
        mode = _mode(name, registry, device, ops)
        for op, kernel in mode.kernels.items():
            pin("kernel", op, kernel, f"--mode {name}")
        if mode.layout is not None:
            pin("layout", "", mode.layout, f"--mode {name}")
        if mode.quant is not None:
            pin("quant", "", mode.quant, f"--mode {name}")
    chosen = {key: value for key, (value, _) in pinned.items()}
    return Pins(
        kernels={what: value for (kind, what), value in chosen.items() if kind == "kernel"},
        layout=chosen.get(("layout", "")),
        quant=chosen.get(("quant", "")),
    )


def mode_misfit(
    mode: ModeSpec, registry: Registry, device: DeviceInfo, ops: Collection[str] | None = None
) -> str | None:
    """Why a mode cannot work on `device` for a model that asks for `ops`, or None if it can."""
    layouts = {spec.name for spec, _ in registry.specs(KVLayoutSpec)}
    if mode.layout is not None and mode.layout not in layouts:
        return f"needs layout {mode.layout}, which no plugin brings"
    if mode.quant is not None and mode.quant not in {spec.name for spec, _ in registry.specs(QuantMethodSpec)}:
        return f"needs quantization method {mode.quant}, which no plugin brings"
    for op, kernel in mode.kernels.items():
        if ops is not None and op not in ops:
            return f"pins {op}, which this model does not use"
        found = [spec for spec, _ in registry.specs(KernelSpec) if (spec.op, spec.name) == (op, kernel)]
        if not found and kernel != REFERENCE:
            return f"needs kernel {kernel} for {op}, which no plugin brings"
        for spec in found:
            if (misfit := device_misfit(spec.when, device)) is not None:
                return f"kernel {kernel} for {op} {misfit}"
    return None


def _mode(name: str, registry: Registry, device: DeviceInfo, ops: Collection[str] | None) -> ModeSpec:
    misfits = [(mode, mode_misfit(mode, registry, device, ops)) for mode, _ in registry.specs(ModeSpec)]
    fitting = ", ".join(sorted(mode.name for mode, misfit in misfits if misfit is None)) or "none"
    for mode, misfit in misfits:
        if mode.name == name and misfit is None:
            return mode
        if mode.name == name:
            raise ConfigError(f"--mode {name} does not fit: {misfit}; modes that fit: {fitting}")
    guess = did_you_mean(name, [mode.name for mode, _ in misfits])
    raise ConfigError(f"there is no mode {name!r}; modes that fit: {fitting}.{guess}")
