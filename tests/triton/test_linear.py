"""Which kernel a linear gets on a GPU: by default, by what was measured, and with --deterministic. No GPU needed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from llmcore.api.specs import DeviceInfo, KernelSpec, OpContext, PluginInfo
from llmcore.registry.resolve import Resolution, candidates_for, resolve, why_not
from llmcore_devtools import registry_of
from llmcore_triton import tuned
from llmcore_triton.specs import linear as specs

H200 = DeviceInfo("cuda", "NVIDIA H200", capability=90, processors=132)
SHAPES: dict[str, dict[str, Any]] = {
    "linear": {"inputs": 4096, "outputs": 28672, "bias": False},
    "linear_silu_and_mul": {"inputs": 4096, "size": 14336, "bias": False},
    "silu_and_mul": {"size": 14336},
}


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Writes what was measured in bucket 1: (op, kernel) -> microseconds, for SHAPES or `shapes` of ops."""

    def write(times: dict[tuple[str, str], float], **shapes: Any) -> None:
        of = {**SHAPES, **shapes}
        entries = [
            {"op": op, "kernel": kernel, "dtype": "bf16", "bucket": 1, "shape": of[op], "us": us, "config": {}}
            for (op, kernel), us in times.items()
        ]
        text = json.dumps({"gpu": H200.name, "capability": 90, "entries": entries})
        (tmp_path / "h200.json").write_text(text, encoding="utf-8")
        tuned._table.cache_clear()

    monkeypatch.setattr(tuned, "_FOLDER", tmp_path)
    write({})
    yield write
    tuned._table.cache_clear()


def chosen(op: str, bucket: int = 1, **more: Any) -> Resolution:
    context = OpContext(op=op, device=H200, dtype="bf16", bucket=bucket, shape=SHAPES[op], **more)
    owner = PluginInfo("triton", "plugin-triton", "1", "triton")
    kernels: list[tuple[KernelSpec, PluginInfo]] = [(spec, owner) for spec in specs.kernels() if spec.op == op]
    return resolve([*candidates_for(registry_of("-triton"), op), *kernels], context, {})


def name(op: str, bucket: int = 1, **more: Any) -> str:
    return chosen(op, bucket, **more).chosen.name


def test_where_nobody_has_measured(measured: Any) -> None:
    assert [name("linear", bucket) for bucket in range(5)] == ["gemv", "small_rows", *["cublas"] * 3]
    gated = [name("linear_silu_and_mul", bucket) for bucket in range(5)]
    assert gated == ["gemv", "small_rows", "torch", "many_rows", "many_rows"]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"shape": {"inputs": 4096, "size": 14337}}, "multiples of 8"),
        ({"shape": {"inputs": 4100, "size": 14336}}, "multiples of 8"),
        ({"shape": {}}, "none is known"),
        ({"device": replace(H200, capability=100)}, "capability"),
        ({"dtype": "f32"}, "f32"),
    ],
)
def test_gate_and_up_of_many_rows_in_turn(change: dict[str, Any], reason: str, measured: Any) -> None:
    spec = next(spec for spec in specs.kernels() if spec.name == "many_rows")
    asked = replace(chosen("linear_silu_and_mul", 4).context, **change)
    assert why_not(spec, replace(asked, **{"shape": SHAPES[asked.op], "device": H200, "dtype": "bf16"})) is None
    assert reason in (why_not(spec, asked) or "")


def test_the_least_time_wins(measured: Any) -> None:
    measured({("linear", "cublas"): 60.0, ("linear", "small_rows"): 55.0})
    assert name("linear") == "small_rows"
    measured({("linear", "cublas"): 60.0, ("linear", "small_rows"): 65.0})
    assert name("linear") == "cublas"
    measured({("linear", "cublas"): 60.0})
    assert name("linear") == "cublas"


def test_a_fusion_must_beat_its_parts(measured: Any) -> None:
    parts = {("linear", "cublas"): 60.0, ("linear", "small_rows"): 58.0, ("silu_and_mul", "triton"): 2.0}
    measured({**parts, ("linear_silu_and_mul", "small_rows"): 59.0})
    assert name("linear_silu_and_mul") == "small_rows"
    measured({**parts, ("linear_silu_and_mul", "small_rows"): 61.0})
    assert "linear and silu_and_mul 60 us" in chosen("linear_silu_and_mul").reasons["small_rows"]
    assert name("linear_silu_and_mul") == "torch"
    measured(parts)
    assert name("linear_silu_and_mul") == "torch"


def test_a_part_that_nobody_measured_for_this_shape_takes_as_long_as_for_others(measured: Any) -> None:
    parts = {("linear", "small_rows"): 58.0, ("silu_and_mul", "triton"): 2.0}
    measured({**parts, ("linear_silu_and_mul", "small_rows"): 59.0}, silu_and_mul={"size": 4096})
    assert name("linear_silu_and_mul") == "small_rows"
    measured({**parts, ("linear_silu_and_mul", "small_rows"): 61.0}, silu_and_mul={"size": 4096})
    assert name("linear_silu_and_mul") == "torch"


@pytest.mark.parametrize("bucket", range(5))
def test_deterministic_leaves_one(bucket: int, measured: Any) -> None:
    assert name("linear", bucket, deterministic=True) == "fixed"
    assert name("linear_silu_and_mul", bucket, deterministic=True) == "torch"
    fixed = next(spec for spec in specs.kernels() if spec.name == "fixed")
    assert fixed.refuses is not None
    assert fixed.refuses(replace(chosen("linear", bucket).context)) is not None
