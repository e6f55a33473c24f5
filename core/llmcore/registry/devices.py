"""The device that a name means, from the specs of devices. No torch here."""

from __future__ import annotations

from llmcore.api.errors import ConfigError, did_you_mean
from llmcore.api.protocols import Device
from llmcore.api.specs import DeviceInfo, DeviceSpec
from llmcore.registry.loader import load
from llmcore.registry.registry import Registry


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
