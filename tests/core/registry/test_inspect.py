"""Listings as rows of data: what a kernel requires, how choices are grouped, which device a name means."""

from __future__ import annotations

import pytest
from llmcore.api.errors import ConfigError, ResolveError
from llmcore.api.specs import (
    TOKEN_BUCKETS,
    DeviceInfo,
    DeviceSpec,
    KernelSpec,
    ModelSpec,
    ModeSpec,
    OpContext,
    OpSpec,
    PluginInfo,
    Requires,
    Spec,
)
from llmcore.registry.inspect import (
    best_device,
    choice_rows,
    choices_for_specs,
    find_device,
    hook_rows,
    kernel_rows,
    mode_rows,
    model_rows,
    plugin_rows,
    requires_text,
)
from llmcore.registry.modes import Pins
from llmcore.registry.registry import Registry
from llmcore.registry.resolve import Resolution

MINE = PluginInfo("mine", "plugin-mine", "1.0", "mine")
CPU = DeviceInfo("cpu")


def registry_of(*specs: Spec) -> Registry:
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


@pytest.mark.parametrize(
    ("when", "text"),
    [
        (Requires(), ""),
        (Requires(device="gpu", capability=(80, 90)), "gpu, capability 80-90"),
        (
            Requires(dtypes=frozenset({"f32", "bf16"}), buckets=frozenset({0, 4})),
            "dtype bf16 or f32, tokens 1 or 257+",
        ),
        (Requires(granules=frozenset({16}), shape={"size": frozenset({64})}), "granule 16, size 64"),
    ],
)
def test_a_requirement_in_words(when: Requires, text: str) -> None:
    assert requires_text(when) == text


def test_every_hook_has_a_row_with_its_contract() -> None:
    rows = {row.name: row for row in hook_rows()}
    assert (
        rows["build_layer"].signature
        == "build_layer(layer: torch.nn.Module, info: LayerInfo) -> torch.nn.Module | None"
    )
    assert all(row.summary and row.called and row.returns and row.chosen_by for row in rows.values())


def test_plugins_that_failed_have_a_row_too() -> None:
    registry = Registry((MINE,))
    registry.fail(MINE, "import", ValueError("no"))
    row = next(row for row in plugin_rows(registry) if row.name == "mine")
    assert (row.state, row.brings) == ("failed", {}) and row.notes[0].startswith("import: ValueError: no; ")


def test_models_modes_and_kernels_are_listed_by_name() -> None:
    family = {"read_config": "m:r", "build": "m:b", "weights": "m:w"}
    registry = registry_of(
        ModelSpec(name="b", architectures=("B",), **family),
        ModelSpec(name="a", architectures=("A", "AA"), **family),
        ModeSpec(name="slow", kernels={"linear": "x"}),
        ModeSpec(name="fast", layout="token"),
        OpSpec(name="linear", module="m", signature="f()"),
        KernelSpec(name="x", op="linear", make="m:m"),
        KernelSpec(name="y", op="linear", make="m:m", priority=60),
    )
    assert [(row.name, row.architectures) for row in model_rows(registry)] == [("a", ("A", "AA")), ("b", ("B",))]
    modes = mode_rows(registry, lambda mode: "too slow" if mode.kernels else None)
    assert [(row.name, row.layout, row.misfit) for row in modes] == [
        ("fast", "token", None),
        ("slow", None, "too slow"),
    ]
    assert [row.name for row in kernel_rows(registry, "linear")] == ["y", "x", "torch"]


def test_token_counts_with_one_outcome_share_a_row() -> None:
    registry = registry_of(
        OpSpec(name="linear", module="m", signature="f()"),
        KernelSpec(name="few", op="linear", make="m:m", when=Requires(buckets=frozenset({0, 1}))),
    )
    rows = choices_for_specs(registry, CPU, "f32", "token", Pins())
    assert [(row.tokens, row.chosen) for row in rows] == [("1, 2-16", "few"), ("17-64, 65-256, 257+", "torch")]
    assert "is for steps of 1 or 2-16 tokens" in rows[1].others["few"]


def test_an_error_of_every_token_count_is_one_row() -> None:
    contexts = [OpContext(op="o", device=CPU, dtype="f32", bucket=bucket) for bucket in range(len(TOKEN_BUCKETS))]
    outcomes: list[tuple[OpContext, Resolution | ResolveError]] = [
        (context, ResolveError(f"bucket {context.bucket}")) for context in contexts
    ]
    (row,) = choice_rows(outcomes)
    assert (row.tokens, row.chosen, row.why) == ("any", None, "bucket 0")


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
