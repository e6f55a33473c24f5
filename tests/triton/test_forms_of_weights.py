"""Kernels for quantized weights, compiled for a Hopper in every form of weights that their ops know.

Triton's interpreter takes another way through `codes.numbers` than the compiler, so a kernel that it runs may still
not compile. Results are checked on GPUs: `llmcore kernels linear.w4a16 --check`.
"""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
from compiled_for_hopper import compiling
from llmcore.api.specs import DeviceInfo, KernelSpec, OpContext, OpSpec
from llmcore.config import Config
from llmcore.registry.loader import build_registry, load, select
from llmcore_devtools.kernels.compare import as_packed

# tensors are on the CPU
HOPPER = DeviceInfo("cpu", "NVIDIA H200", capability=90, processors=132)
REGISTRY = build_registry(Config(discovered=select(None).plugins))

LINEARS = (("small_rows", 1), ("many_rows", 3), ("scratch", 4))
CASES = (
    *((op, *kernel) for op in ("linear.w4a16", "linear.w8a16") for kernel in LINEARS),
    *((f"moe.experts.{form}", "triton", bucket) for form in ("w4a16", "w8a16") for bucket in (4,)),
    *((f"moe.fused.{form}", "triton", 0) for form in ("w4a16", "w8a16")),
)
"""(op, kernel, token bucket)"""


@pytest.mark.parametrize(("op", "kernel", "bucket"), CASES)
def test_it_compiles(op: str, kernel: str, bucket: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = compiling(tmp_path, monkeypatch)
    module = importlib.import_module(REGISTRY.find(OpSpec, op).module)
    make = next(spec.make for spec, _ in REGISTRY.specs(KernelSpec) if (spec.op, spec.name) == (op, kernel))
    for shape in module.SHAPES:
        context = OpContext(op=op, dtype="bf16", bucket=bucket, shape=shape, device=HOPPER)
        before = len(compiled)
        made = load(make)(context)
        made(*as_packed(made, module, context, next(iter(module.samples(context)))))
        assert len(compiled) > before
