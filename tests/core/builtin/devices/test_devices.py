"""The built-in devices: which there are, and their names on other machines."""

from __future__ import annotations

import pytest
from llmcore.builtin.devices import register_devices
from llmcore.registry.loader import load


def test_every_spec_loads() -> None:
    specs = list(register_devices())
    assert [spec.name for spec in specs] == ["cuda", "cpu"]
    for spec in specs:
        assert callable(load(spec.make))
        assert load(spec.available)() is None or spec.name == "cuda"


@pytest.mark.parametrize(
    ("device", "text", "capability"),
    [("cpu", "cpu", None), ("cuda", "sm90", 90), ("cuda", "sm_120", 120)],
)
def test_a_device_of_another_machine_is_known_by_its_name(device: str, text: str, capability: int | None) -> None:
    named = {spec.name: load(spec.named)(text) for spec in register_devices()}
    assert {name for name, info in named.items() if info is not None} == {device}
    assert (named[device].type, named[device].capability) == (device, capability)


@pytest.mark.parametrize("text", ["auto", "gpu", "sm9", "sm9000", "xsm90", "CPU"])
def test_other_names_are_none_of_them(text: str) -> None:
    assert all(load(spec.named)(text) is None for spec in register_devices())
