"""Wrong types in a spec's fields are named, and right ones pass."""

from __future__ import annotations

from typing import Any

import pytest
from llmcore.api.specs import (
    DeviceSpec,
    KernelSpec,
    ModelSpec,
    ModeSpec,
    OptionSpec,
    OutputParserSpec,
    Requires,
    TokenizerSpec,
)
from llmcore.registry.well_formed import misfit

FAMILY = {"read_config": "m:r", "build": "m:b", "weights": "m:w"}


@pytest.mark.parametrize(
    ("kind", "given", "message"),
    [
        (KernelSpec, {"op": "linear", "make": "m:m", "priority": "high"}, "KernelSpec.priority is a str, needs int"),
        (KernelSpec, {"op": "linear", "make": "m:m", "refuses": "m:r"}, "KernelSpec.refuses is a str, needs "),
        (KernelSpec, {"op": "linear", "make": "m:m", "tolerance": {"f32": "no"}}, "KernelSpec.tolerance is a dict"),
        (ModelSpec, {"architectures": ["A"], **FAMILY}, "ModelSpec.architectures is a list, needs tuple[str, ...]"),
        (ModelSpec, {"architectures": ("A", 1), **FAMILY}, "ModelSpec.architectures is a tuple"),
        (ModeSpec, {"kernels": ("linear",)}, "ModeSpec.kernels is a tuple, needs "),
        (
            TokenizerSpec,
            {"sniff": "m:s", "mode": "medium"},
            "TokenizerSpec.mode is a str, needs Literal",
        ),
        (
            OutputParserSpec,
            {"kind": "tool", "make": "m:m", "thought_tags": ("a",)},
            "OutputParserSpec.thought_tags",
        ),
        (OutputParserSpec, {"kind": "tool", "make": "m:m", "thought_tags": ("a", 1)}, "OutputParserSpec.thought_tags"),
        (OptionSpec, {"type": "int"}, "OptionSpec.type is a str, needs type"),
        (DeviceSpec, {"make": None, "available": "m:a"}, "DeviceSpec.make is a NoneType, needs str"),
    ],
)
def test_the_first_wrong_field_is_named(kind: Any, given: dict[str, Any], message: str) -> None:
    said = misfit(kind(name="x", **given))
    assert said is not None and said.startswith(message)


@pytest.mark.parametrize(
    "spec",
    [
        KernelSpec(name="x", op="linear", make="m:m", when=Requires(device="cpu"), tolerance={"f32": 1e-3}),
        ModelSpec(name="x", architectures=("A", "B"), **FAMILY),
        OptionSpec(name="x", type=int, default=3, low=0.5),
        OutputParserSpec(name="x", kind="tool", make="m:m", thought_tags=("a", "b")),
    ],
)
def test_right_types_pass(spec: Any) -> None:
    assert misfit(spec) is None
