"""The ops of latent attention: every torch kernel is what its op means, in each dtype and token bucket."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import llmcore_deepseek.ops
import pytest
from llmcore.api import DeviceInfo, KernelSpec, OpContext
from llmcore.ops import made
from llmcore.registry.resolve import REFERENCE
from llmcore_deepseek import register_ops
from llmcore_devtools.kernels.compare import check

OPS = {spec.name: spec for spec in register_ops()}


def context(op: str, dtype: str = "f32", **more: Any) -> OpContext:
    return OpContext(op=op, device=DeviceInfo("cpu"), dtype=dtype, **more)  # type: ignore[arg-type]


def test_every_module_has_an_op() -> None:
    files = {file.stem for file in Path(llmcore_deepseek.ops.__file__).parent.glob("*.py")} - {"__init__"}
    assert files == {spec.module.rpartition(".")[2] for spec in OPS.values()}


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("op", OPS)
def test_torch_kernel(op: str, dtype: str) -> None:
    module = importlib.import_module(OPS[op].module)
    layout = next(iter(getattr(module, "LAYOUTS", ())), None)
    torch_kernel = KernelSpec(name=REFERENCE, op=op, make=f"{OPS[op].module}:make")
    for bucket in range(5):
        for shape in module.SHAPES:
            where = context(op, dtype, bucket=bucket, layout=layout, shape=shape)
            assert check(module, made(torch_kernel, where), where) > 0
