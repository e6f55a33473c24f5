"""Plugins, hooks, models, kernels and modes as rows of data, with reasons. Commands print them; no torch here."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from llmcore.api import hookspecs, specs
from llmcore.api.errors import ConfigError, ResolveError, did_you_mean
from llmcore.api.protocols import Device
from llmcore.api.specs import TOKEN_BUCKETS, DeviceInfo, DeviceSpec, DType, OpContext, PluginInfo, Requires
from llmcore.registry.loader import available, load
from llmcore.registry.modes import Pins
from llmcore.registry.registry import CONTRIBUTIONS, KIND_NAMES, Registry
from llmcore.registry.resolve import Resolution, bucket_text, candidates_for, resolve


@dataclass(frozen=True)
class PluginRow:
    """One plugin. `state`: "active", "failed" or "off"; `hooks`: what it implements; `brings`: kind -> names."""

    name: str
    dist: str
    version: str
    entry_point: str
    state: str
    hooks: tuple[str, ...] = ()
    brings: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class HookRow:
    """One hook: its signature, its contract, and the active plugins that implement it."""

    name: str
    signature: str
    summary: str
    called: str
    returns: str
    chosen_by: str
    plugins: tuple[str, ...] = ()


@dataclass(frozen=True)
class ModelRow:
    """One model family."""

    name: str
    architectures: tuple[str, ...]
    plugin: str
    dist: str
    version: str
    summary: str


@dataclass(frozen=True)
class KernelRow:
    """One kernel of one op; `requires` in words."""

    op: str
    name: str
    plugin: str
    dist: str
    priority: int
    requires: str
    summary: str


@dataclass(frozen=True)
class ChoiceRow:
    """The kernel that an op gets for some token counts, and a reason for each other one.

    `chosen` is None if no kernel can be chosen; `why` is then the error.
    """

    op: str
    tokens: str
    shape: Mapping[str, int | float | str | bool | None]
    chosen: str | None
    plugin: str | None
    why: str
    others: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class ModeRow:
    """One mode and its pins. `misfit`: why it cannot work on the device, or None if it can."""

    name: str
    plugin: str
    layout: str | None
    kernels: Mapping[str, str]
    quant: str | None
    misfit: str | None
    summary: str


def plugin_rows(registry: Registry) -> list[PluginRow]:
    """Every plugin by name: those that take part, those that failed, and those that `--plugins` left out."""
    active = set(registry.plugins)
    everyone = {*available(), *registry.offered}
    return [_plugin_row(registry, info, info in active) for info in sorted(everyone, key=lambda i: (i.name, i.dist))]


def _plugin_row(registry: Registry, info: PluginInfo, active: bool) -> PluginRow:
    failures = [f"{f.stage}: {f.error.rstrip('.')}; {f.fix}" for f in registry.failures if f.plugin == info]
    declined = [f"{KIND_NAMES[type(d.spec)]} {d.spec.name}: {d.reason}" for d in registry.declined if d.plugin == info]
    brings = {
        KIND_NAMES[kind]: tuple(_called(spec) for spec, plugin in registry.specs(kind) if plugin == info)
        for kind in CONTRIBUTIONS.values()
    }
    state = "active" if active else "failed" if failures else "off"
    return PluginRow(
        name=info.name,
        dist=info.dist,
        version=info.version,
        entry_point=info.entry_point,
        state=state,
        hooks=tuple(hook for hook in hookspecs.HOOKS if active and info in registry.implementers(hook)),
        brings={kind: names for kind, names in brings.items() if names},
        notes=(*failures, *declined),
    )


def _called(spec: specs.Spec) -> str:
    return f"{spec.op}={spec.name}" if isinstance(spec, specs.KernelSpec) else spec.name


def hook_rows(registry: Registry | None = None) -> list[HookRow]:
    """Every hook in the order of `llmcore.api.hookspecs`."""
    return [_hook_row(name, function, registry) for name, function in hookspecs.HOOKS.items()]


def _hook_row(name: str, function: Callable[..., Any], registry: Registry | None) -> HookRow:
    summary, *paragraphs = inspect.cleandoc(function.__doc__ or "").split("\n\n")
    contract = _contract(paragraphs[-1] if paragraphs else "")
    return HookRow(
        name=name,
        signature=f"{name}{inspect.signature(function)}".replace("'", ""),
        summary=" ".join(summary.split()),
        called=contract["Called"],
        returns=contract["Returns"],
        chosen_by=contract["Chosen by"],
        plugins=tuple(info.name for info in registry.implementers(name)) if registry else (),
    )


def _contract(text: str) -> dict[str, str]:
    found = dict.fromkeys(("Called", "Returns", "Chosen by"), "")
    part = ""
    for line in text.splitlines():
        head, colon, rest = line.partition(":")
        if colon and head in found:
            part, line = head, rest
        if part:
            found[part] = f"{found[part]} {line.strip()}".strip()
    return found


def model_rows(registry: Registry) -> list[ModelRow]:
    """Every family, by name."""
    rows = [
        ModelRow(spec.name, spec.architectures, plugin.name, plugin.dist, plugin.version, spec.summary)
        for spec, plugin in registry.specs(specs.ModelSpec)
    ]
    return sorted(rows, key=lambda row: row.name)


def mode_rows(registry: Registry, misfit: Callable[[specs.ModeSpec], str | None]) -> list[ModeRow]:
    """Every mode, by name. `misfit` returns why a mode cannot work, or None if it can."""
    rows = [
        ModeRow(
            name=spec.name,
            plugin=plugin.name,
            layout=spec.layout,
            kernels=dict(spec.kernels),
            quant=spec.quant,
            misfit=misfit(spec),
            summary=spec.summary,
        )
        for spec, plugin in registry.specs(specs.ModeSpec)
    ]
    return sorted(rows, key=lambda row: row.name)


def kernel_rows(registry: Registry, op: str | None = None) -> list[KernelRow]:
    """Every kernel of `op`, or of all ops: by op, the highest priority first."""
    rows = []
    for name in [op] if op else sorted(spec.name for spec, _ in registry.specs(specs.OpSpec)):
        kernels = sorted(candidates_for(registry, name), key=lambda pair: (-pair[0].priority, pair[0].name))
        rows += [
            KernelRow(name, spec.name, plugin.name, plugin.dist, spec.priority, requires_text(spec.when), spec.summary)
            for spec, plugin in kernels
        ]
    return rows


def requires_text(when: Requires) -> str:
    """A kernel's requirement in words; "" if it has none."""
    parts = [when.device] if when.device else []
    if when.capability:
        parts.append("capability {}-{}".format(*when.capability))
    named = {"dtype": when.dtypes, "layout": when.layouts, "granule": when.granules}
    tokens = frozenset(bucket_text(bucket) for bucket in when.buckets)
    sets: Mapping[str, Iterable[object]] = {**named, "tokens": tokens, **when.shape}
    parts += [f"{name} {' or '.join(sorted(map(str, values)))}" for name, values in sets.items() if values]
    return ", ".join(parts)


# --- choices ---------------------------------------------------------------------------------------------------


def best_device(registry: Registry) -> DeviceSpec:
    """The device of `--device auto`: the available one with the highest priority. Raises ConfigError."""
    missing = {spec.name: load(spec.available)() for spec, _ in registry.specs(DeviceSpec)}
    usable = [spec for spec, _ in registry.specs(DeviceSpec) if missing[spec.name] is None]
    if not usable:
        why = "; ".join(f"{name}: {reason}" for name, reason in missing.items()) or "no plugin brings one"
        raise ConfigError(f"no device can be used ({why})")
    return max(usable, key=lambda spec: (spec.priority, spec.name))


def find_device(registry: Registry, name: str) -> DeviceInfo:
    """The device that `name` means ("cpu", "sm90"), even if this machine does not have it.

    `auto` means the device that a server would take. Raises ConfigError that lists the kinds.
    """
    if name == "auto":
        device: Device = load(best_device(registry).make)(0)
        return device.info
    devices = registry.specs(DeviceSpec)
    for spec, _ in devices:
        found: DeviceInfo | None = load(spec.named)(name) if spec.named else None
        if found is not None:
            return found
        if spec.name == name:
            return DeviceInfo(name)
    kinds = [spec.name for spec, _ in devices]
    raise ConfigError(f"there is no device {name!r}; kinds: {', '.join(kinds) or 'none'}.{did_you_mean(name, kinds)}")


def choices_for_specs(
    registry: Registry, device: DeviceInfo, dtype: DType, layout: str, pins: Pins, deterministic: bool = False
) -> list[ChoiceRow]:
    """The kernel of every op on `device`, from specs alone: without shapes, at granule 1."""
    outcomes: list[tuple[OpContext, Resolution | ResolveError]] = []
    for op in sorted(spec.name for spec, _ in registry.specs(specs.OpSpec)):
        for bucket in range(len(TOKEN_BUCKETS)):
            context = OpContext(
                op=op, device=device, dtype=dtype, layout=layout, bucket=bucket, deterministic=deterministic
            )
            try:
                resolution = resolve(candidates_for(registry, op), context, pins.kernels, registry.order)
                outcomes.append((context, resolution))
            except ResolveError as error:
                outcomes.append((context, error))
    return choice_rows(outcomes)


def choice_rows(outcomes: Iterable[tuple[OpContext, Resolution | ResolveError]]) -> list[ChoiceRow]:
    """One row per op, shape and set of buckets with the same outcome, in the order of `outcomes`."""
    grouped: dict[str, tuple[ChoiceRow, set[int]]] = {}
    for context, outcome in outcomes:
        row = ChoiceRow(context.op, "", dict(context.shape), None, None, str(outcome))
        if isinstance(outcome, Resolution):
            chosen, reasons = outcome.chosen.name, dict(outcome.reasons)
            row = ChoiceRow(context.op, "", row.shape, chosen, outcome.plugin.name, outcome.why, reasons)
        key = repr(row) if row.chosen else f"{context.op} {row.shape}"
        grouped.setdefault(key, (row, set()))[1].add(context.bucket)
    return [replace(row, tokens=_tokens(buckets)) for row, buckets in grouped.values()]


def _tokens(buckets: Collection[int]) -> str:
    if len(buckets) == len(TOKEN_BUCKETS):
        return "any"
    return ", ".join(bucket_text(bucket) for bucket in sorted(buckets))
