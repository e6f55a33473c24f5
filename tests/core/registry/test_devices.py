"""Which device a name means."""

from __future__ import annotations

import pytest
from llmcore.api.errors import ConfigError
from llmcore.api.specs import DeviceInfo, DeviceSpec, PluginInfo
from llmcore.registry.devices import best_device, find_device
from llmcore.registry.registry import Registry

MINE = PluginInfo("mine", "plugin-mine", "1.0", "mine")


def registry_of(*specs: DeviceSpec) -> Registry:
    registry = Registry((MINE,))
    registry.plugins.append(MINE)
    for spec in specs:
        registry.take(spec, MINE)
    return registry


def none_missing() -> None:
    """DeviceSpec.available of a device that is here."""


def away() -> str:
    """DeviceSpec.available of a device that is not here."""
    return "no driver"


def device(name: str, priority: int, available: str = "none_missing") -> DeviceSpec:
    return DeviceSpec(name=name, make="m:m", available=f"{__name__}:{available}", priority=priority)


def test_the_best_device_is_available_and_has_the_highest_priority() -> None:
    devices = (device("cpu", 10), device("gpu", 90, "away"), device("npu", 50))
    assert best_device(registry_of(*devices)).name == "npu"
    with pytest.raises(ConfigError, match=r"no device can be used \(gpu: no driver\)"):
        best_device(registry_of(devices[1]))


def test_an_unknown_device_lists_the_kinds() -> None:
    registry = registry_of(device("cpu", 10), device("gpu", 90, "away"))
    assert find_device(registry, "gpu") == DeviceInfo("gpu")
    with pytest.raises(ConfigError, match=r"no device 'gpa'; kinds: cpu, gpu. Did you mean gpu\?"):
        find_device(registry, "gpa")
