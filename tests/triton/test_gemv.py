"""When one token's linear over codes of 8 bits goes to gemv, and why it declines. No GPU needed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from llmcore.api.specs import DeviceInfo, OpContext
from llmcore.config import Config
from llmcore.registry.loader import build_registry, select
from llmcore.registry.resolve import candidates_for, resolve

H200 = DeviceInfo("cuda", "NVIDIA H200", capability=90, processors=132)
REGISTRY = build_registry(Config(discovered=select(None).plugins))
ROWS, GROUPS = "linear.w8a8", "linear.fp8_block"


def context(op: str, bucket: int = 0, capability: int = 90, **shape: Any) -> OpContext:
    sizes = {"inputs": 4096, "outputs": 4096, "bias": False}
    codes = {"codes": "e4m3", "group": 128 if op == GROUPS else 0, "scale": "f32", "zeros": False, "ordered": False}
    device = replace(H200, capability=capability)
    return OpContext(op=op, device=device, dtype="bf16", bucket=bucket, shape={**sizes, **codes, **shape})


def chosen(asked: OpContext) -> tuple[str, str]:
    """The kernel, and why gemv declines."""
    found = resolve(candidates_for(REGISTRY, asked.op), asked, {})
    return found.chosen.name, found.reasons.get("gemv", "")


@pytest.mark.parametrize("codes", ["i8", "e4m3"])
@pytest.mark.parametrize("op", [ROWS, GROUPS])
def test_the_least_time_wins(op: str, codes: str, measured: Any) -> None:
    asked = context(op, codes=codes)
    assert chosen(asked) == ("small_rows", "nobody has measured it here")
    measured(asked, gemv=6.0, small_rows=7.0)
    assert chosen(asked)[0] == "gemv"
    measured(asked, gemv=8.0, small_rows=7.0)
    assert chosen(asked)[0] == "small_rows"
    assert chosen(replace(asked, bucket=1))[0] == "small_rows"


@pytest.mark.parametrize(
    ("op", "more", "reason"),
    [
        (ROWS, {"inputs": 4104}, "inputs to be a multiple of 16"),
        (ROWS, {"capability": 86}, "converts fp8"),
        (GROUPS, {"group": 64}, "groups of 128"),
    ],
)
def test_shapes_that_decline(op: str, more: dict[str, Any], reason: str, measured: Any) -> None:
    assert reason in chosen(context(op, **more))[1]
