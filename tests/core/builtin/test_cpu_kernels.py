"""The table of CPU kernels: every file of llmcore.builtin.cpu has a kernel in it, and each is one of a known op."""

from __future__ import annotations

from pathlib import Path

import llmcore.builtin.cpu
import pytest
from llmcore.api.specs import DeviceInfo, OpContext
from llmcore.builtin import cpu
from llmcore.builtin.cpu import register_kernels
from llmcore.builtin.ops import register_ops
from llmcore.registry.loader import load
from llmcore.registry.resolve import why_not

KERNELS = {spec.op: spec for spec in register_kernels()}


def context(op: str, dtype: str = "f32", **shape: object) -> OpContext:
    layout = "token" if op.startswith("attn") else None
    return OpContext(op=op, device=DeviceInfo("cpu"), dtype=dtype, layout=layout, granule=1, bucket=0, shape=shape)


def test_the_table_is_complete() -> None:
    files = {file.stem for file in Path(llmcore.builtin.cpu.__file__).parent.glob("*.py")} - {"__init__"}
    assert files == {spec.make.partition(":")[0].rpartition(".")[2] for spec in KERNELS.values()}
    assert set(KERNELS) <= {spec.name for spec in register_ops()}
    assert all(callable(load(spec.make)) for spec in KERNELS.values())


@pytest.mark.parametrize(
    ("op", "shape", "reason"),
    [
        ("rope", {"size": 16, "rotated": 8}, "turns whole heads, not 8 of 16 elements"),
        ("attn.gqa.decode", {"soft_cap": 30.0}, "has no soft cap and no sinks"),
        ("attn.gqa.prefill", {"mask": "full"}, "has no full mask"),
        ("attn.gqa.decode", {"key_size": 8, "value_size": 4}, "needs keys and values of one size"),
    ],
)
def test_a_kernel_says_what_it_cannot_compute(op: str, shape: dict[str, object], reason: str) -> None:
    assert reason in (why_not(KERNELS[op], context(op, **shape)) or "")


@pytest.mark.parametrize(
    ("flags", "dtype", "fits"), [("avx2", "f32", True), ("avx2", "bf16", False), ("", "f32", False)]
)
def test_onednn_needs_its_processor_flag(flags: str, dtype: str, fits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "_processor_flags", lambda: frozenset(flags.split()))
    assert (why_not(KERNELS["linear"], context("linear", dtype)) is None) == fits
