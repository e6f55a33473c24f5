"""Kernels for quantized weights, compiled for a Hopper in every form of weights that their ops know.

Triton's interpreter takes another way through `codes.numbers` than the compiler, so a kernel that it runs may still
not compile. Results are checked on GPUs: `llmcore kernels linear.w4a16 --check`.
"""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
from compiled_for_hopper import compiling, instructions
from llmcore.api.specs import DeviceInfo, KernelSpec, OpContext, OpSpec
from llmcore.config import Config
from llmcore.registry.loader import build_registry, load, select
from llmcore_devtools.kernels.compare import as_packed
from llmcore_triton.quantized import fused

# tensors are on the CPU
HOPPER = DeviceInfo("cpu", "NVIDIA H200", capability=90, processors=132)
REGISTRY = build_registry(Config(discovered=select(None).plugins))

LINEARS = (("small_rows", 1), ("many_rows", 3), ("scratch", 4))
CASES = (
    *(("linear.{}", *kernel) for kernel in LINEARS),
    ("moe.experts.{}", "triton", 4),
    ("moe.fused.{}", "triton", 0),
)
"""(op, kernel, token bucket)"""
FOUR_BITS, EIGHT_BITS = "w4a16", pytest.param("w8a16", marks=pytest.mark.compiled)


@pytest.mark.parametrize("form", [FOUR_BITS, EIGHT_BITS])
@pytest.mark.parametrize(("op", "kernel", "bucket"), CASES)
def test_it_compiles(
    op: str, kernel: str, bucket: int, form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    op = op.format(form)
    compiled = compiling(tmp_path, monkeypatch)
    module = importlib.import_module(REGISTRY.find(OpSpec, op).module)
    make = next(spec.make for spec, _ in REGISTRY.specs(KernelSpec) if (spec.op, spec.name) == (op, kernel))
    for shape in module.SHAPES:
        context = OpContext(op=op, dtype="bf16", bucket=bucket, shape=shape, device=HOPPER)
        before = len(compiled)
        made = load(make)(context)
        made(*as_packed(made, module, context, next(iter(module.samples(context)))))
        assert len(compiled) > before


FORMS = (
    *(("u4", 128, "f16", True, "bf16"), ("u4", 64, "bf16", False, "f16"), ("i8", 128, "f16", True, "bf16")),
    *(("e4m3", 0, "f32", False, "bf16"), ("e4m3", 0, "f32", False, "f32")),
)
"""(codes, group, type of scales, zeros, the model's dtype)"""


@pytest.mark.compiled
@pytest.mark.parametrize(("codes", "group", "scale", "zeros", "dtype"), FORMS)
def test_experts_of_one_token(
    codes: str, group: int, scale: str, zeros: bool, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Qwen3-30B-A3B's rows. No register is spilled, words come 16 bytes at a time, and those that a thread loads at
    once are under way before the first is multiplied."""
    compiled = compiling(tmp_path, monkeypatch)
    told = {"codes": codes, "group": group, "zeros": zeros, "scale_type": scale}
    shape = {"experts": 2, "top_k": 2, "scoring": "softmax", "size": 2048, "inner": 768, **told}
    op = "moe.fused.w4a16" if codes == "u4" else "moe.fused.w8a16"
    context = OpContext(op=op, dtype=dtype, bucket=0, shape=shape, device=HOPPER)
    module = importlib.import_module(REGISTRY.find(OpSpec, op).module)
    made = fused.make_with(context, fused.default(context))
    made(*as_packed(made, module, context, next(iter(module.samples(context)))))
    found = {kernel.metadata.name: instructions(kernel, tmp_path) for kernel in compiled}
    for name in ("gate_up_of_token", "down_of_token"):
        lines = found[name].splitlines()
        words = [i for i, line in enumerate(lines) if "LDG.E.EF" in line]
        assert words and all("LDG.E.EF.128" in lines[i] for i in words)
        if dtype != "f32":
            assert not any("LDL" in line or "STL" in line for line in lines)
        first = next(i for i, line in enumerate(lines) if "FFMA" in line)
        assert sum(i < first for i in words) >= 4
