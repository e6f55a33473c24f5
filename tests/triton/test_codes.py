"""Which kernel a linear over codes of 8 bits gets on a GPU: by default, and by what was measured. No GPU needed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import triton
from llmcore.api.specs import DeviceInfo, KernelSpec, OpContext, PluginInfo
from llmcore.registry.resolve import candidates_for, resolve, why_not
from llmcore_devtools import registry_of
from llmcore_triton.specs import quantized as specs

H200 = DeviceInfo("cuda", "NVIDIA H200", capability=90, processors=132)
ROWS, GROUPS = "linear.w8a8", "linear.fp8_block"


def context(op: str, codes: str = "e4m3", bucket: int = 4, **more: Any) -> OpContext:
    shape = {"inputs": 4096, "outputs": 6144, "bias": False, "codes": codes, "group": 128 if op == GROUPS else 0}
    given = {"device": H200, "dtype": "bf16", **more}
    return OpContext(op=op, bucket=bucket, shape={**shape, **given.pop("shape", {})}, **given)


def name(asked: OpContext) -> str:
    owner = PluginInfo("triton", "plugin-triton", "1", "triton")
    kernels = [(spec, owner) for spec in specs.eight_bit_kernels() if spec.op == asked.op]
    return resolve([*candidates_for(registry_of("-triton"), asked.op), *kernels], asked, {}).chosen.name


def spec(op: str, kernel: str) -> KernelSpec:
    return next(spec for spec in specs.eight_bit_kernels() if (spec.op, spec.name) == (op, kernel))


@pytest.mark.parametrize(("op", "codes"), [(ROWS, "i8"), (ROWS, "e4m3"), (GROUPS, "e4m3")])
def test_where_nobody_has_measured(op: str, codes: str, measured: Any) -> None:
    names = [name(context(op, codes, bucket)) for bucket in range(5)]
    assert names == [*["small_rows"] * 3, "many_rows", "many_rows"]
    ampere = [name(context(op, codes, bucket, device=replace(H200, capability=80))) for bucket in range(5)]
    assert ampere == [*["small_rows" if codes == "i8" else "torch"] * 3, "torch", "torch"]
    assert name(context(op, codes, deterministic=True)) == "torch"


@pytest.mark.parametrize("op", [ROWS, GROUPS])
def test_the_least_time_wins(op: str, measured: Any) -> None:
    asked = context(op, bucket=3)
    measured(asked, many_rows=20.0, small_rows=18.0)
    assert name(asked) == "small_rows"
    measured(asked, many_rows=20.0, small_rows=18.0, cublas=15.0)
    assert name(asked) == "cublas"
    measured(asked, many_rows=20.0, cublas=20.0)
    assert name(asked) == "many_rows"
    measured(asked, many_rows=20.0, cublas_unscaled=18.0)
    assert name(asked) == ("cublas_unscaled" if op == ROWS else "many_rows")
    measured(asked, many_rows=20.0, warpgroups=18.0)
    assert name(asked) == "warpgroups"
    fewer = context(op, bucket=2)
    measured(fewer, many_rows=20.0, small_rows=25.0)
    assert name(fewer) == "many_rows"


def test_where_gluon_is_another(measured: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, kernel = context(ROWS, "i8"), spec(ROWS, "warpgroups")
    measured(asked, warpgroups=1.0)
    assert why_not(kernel, asked) is None
    with monkeypatch.context() as other:
        other.setattr(triton, "__version__", "3.7.0")
        assert "Gluon of Triton 3.6.x, not of 3.7.0" in (why_not(kernel, asked) or "")
    monkeypatch.setattr(triton.knobs.runtime, "interpret", True)
    assert "interpreter" in (why_not(kernel, asked) or "")


@pytest.mark.parametrize(
    ("op", "kernel", "shape", "reason"),
    [
        (ROWS, "many_rows", {"inputs": 4104}, "inputs to be a multiple of 16"),
        (ROWS, "many_rows", {"outputs": 6148}, "outputs to be a multiple of 8"),
        (ROWS, "cublas", {"outputs": 6152}, "outputs to be a multiple of 16"),
        (ROWS, "cublas", {"codes": "i8"}, "needs codes e4m3"),
        (ROWS, "cublas_unscaled", {"outputs": 6152}, "outputs to be a multiple of 16"),
        (ROWS, "cublas_unscaled", {}, "nobody has measured it here"),
        (ROWS, "warpgroups", {"outputs": 6152}, "outputs to be a multiple of 16"),
        (ROWS, "warpgroups", {}, "nobody has measured it here"),
        (GROUPS, "cublas", {"inputs": 128}, "inputs to be a multiple of 512"),
        (GROUPS, "many_rows", {"group": 64}, "groups of 128"),
        (GROUPS, "small_rows", {"group": 64}, "groups of 128"),
    ],
)
def test_shapes_that_decline(op: str, kernel: str, shape: dict[str, Any], reason: str) -> None:
    assert reason in (why_not(spec(op, kernel), context(op, bucket=3, shape=shape)) or "")


def test_blocks_need_a_cublas_that_has_them(measured: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = context(GROUPS)
    measured(asked, cublas=1.0)
    for cuda, chosen in (("12.8", "many_rows"), ("12.9", "cublas"), ("13.0", "cublas")):
        monkeypatch.setattr(torch.version, "cuda", cuda)
        assert name(asked) == chosen
