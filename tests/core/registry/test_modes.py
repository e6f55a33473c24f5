"""Modes and pins: what they settle, and why one that cannot work does not."""

from __future__ import annotations

import pytest
from llmcore.api.errors import ConfigError
from llmcore.api.specs import DeviceInfo, KernelSpec, KVLayoutSpec, ModeSpec, OpSpec, PluginInfo, QuantMethodSpec
from llmcore.registry.modes import apply_modes, joined, mode_misfit
from llmcore.registry.registry import Registry


def modes_registry() -> Registry:
    registry = Registry(())
    mine = PluginInfo("mine", "mine", "1", "mine")
    for spec in (
        OpSpec(name="linear", module="m", signature=""),
        KernelSpec(name="fast", op="linear", make="m:m"),
        KVLayoutSpec(name="token-int8", make="m:m"),
        ModeSpec(name="int8kv", layouts={"token": "token-int8"}),
        ModeSpec(name="quick", kernels={"linear": "fast"}),
        ModeSpec(name="plain", kernels={"linear": "torch"}),
        ModeSpec(name="fp8kv", layouts={"token": "token-fp8"}),
        ModeSpec(name="w4", quant="awq", asked=({"format": ("awq",)}, {"bits": (4, 5), "group": (None,)})),
        ModeSpec(name="absent", kernels={"linear": "nobody"}),
        ModeSpec(name="w8", quant="int8"),
        ModeSpec(name="g64", quant_options={"group": 64}),
        ModeSpec(name="g32", quant_options={"group": 32}),
        QuantMethodSpec(name="int8", make="m:m", plain=True, options=frozenset({"group"})),
    ):
        registry.take(spec, mine)
    return registry


def test_modes_and_pins_settle_layout_and_kernels() -> None:
    pins = apply_modes(["int8kv", "quick"], modes_registry(), DeviceInfo("cpu"), ["linear=fast"])
    assert (pins.kernels, pins.layouts, pins.quant) == ({"linear": "fast"}, {"token": "token-int8"}, None)
    assert not pins.quant_options
    pins = apply_modes(["g64", "w8"], modes_registry(), DeviceInfo("cpu"))
    assert (pins.quant, pins.quant_options) == ("int8", {"group": 64})


@pytest.mark.parametrize(
    ("modes", "pins", "message"),
    [
        (["quick", "plain"], [], "--mode quick pins kernel linear to 'fast', --mode plain to 'torch'"),
        (["quick"], ["linear=torch"], "--kernel linear=torch pins kernel linear to 'torch', --mode quick to 'fast'"),
        (
            ["qick"],
            [],
            "--mode qick: there is no such mode; modes that fit: g32, g64, int8kv, plain, quick, w8. Did you mean q",
        ),
        (
            ["fp8kv"],
            [],
            "--mode fp8kv does not fit cpu: needs layout token-fp8, which no plugin brings; modes that fit",
        ),
        (["w4"], [], "--mode w4 or --format awq or --bits 4 does not fit cpu: needs quantization method awq"),
        (["absent"], [], "needs kernel nobody for linear"),
        (["w8", "g64", "g32"], [], "--mode g64 pins quant option group to 64, --mode g32 to 32; give one of them"),
        (
            ["g64"],
            [],
            "--mode g64 chooses the group of a mode that quantizes weights, and no such mode is given; give one "
            "beside it: w8$",
        ),
        ([], ["linear"], "'linear' is no pin: it needs the form op=kernel"),
        ([], ["lineer=fast"], r"no op 'lineer'; known: linear. Did you mean linear\?"),
    ],
)
def test_modes_that_cannot_work_say_why(modes: list[str], pins: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        apply_modes(modes, modes_registry(), DeviceInfo("cpu"), pins)


def test_a_mode_for_ops_that_the_model_lacks_does_not_fit() -> None:
    registry = modes_registry()
    quick = registry.find(ModeSpec, "quick")
    assert mode_misfit(quick, registry, DeviceInfo("cpu"), {"linear"}) is None
    why = mode_misfit(quick, registry, DeviceInfo("cpu"), {"attn.gqa.decode"})
    assert why == "pins linear, which this model does not use"
    stray = ModeSpec(name="stray", kernels={"lineer": "torch"})
    assert mode_misfit(stray, registry, DeviceInfo("cpu")) == "pins lineer, which is an op of no active plugin"


def test_joined_modes_pin_what_each_pins() -> None:
    registry = modes_registry()
    modes = [registry.find(ModeSpec, name) for name in ("w8", "int8kv", "quick", "g64")]
    pins = apply_modes([mode.name for mode in modes], registry, DeviceInfo("cpu"))
    one = joined(modes)
    assert (one.kernels, one.layouts, one.quant, one.quant_options) == (
        pins.kernels,
        pins.layouts,
        pins.quant,
        pins.quant_options,
    )
