"""The layouts that the kernels know are those of plugin-quantization, and every one has a kernel that writes it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from llmcore.api.specs import DeviceInfo, OpContext
from llmcore.registry.resolve import candidates_for, resolve, why_not
from llmcore_devtools import registry_of
from llmcore_quantization.kv.layouts import LATENT_GROUP
from llmcore_quantization.kv.names import FORMS, LATENT
from llmcore_triton.specs.layouts import QUANTIZED, QUANTIZED_LATENT, Form

H200 = DeviceInfo("cuda", "NVIDIA H200", capability=90, processors=132)
HEADS = {"heads": 4, "kv_heads": 2, "size": 64, "rotated": 64}
ROW = {"heads": 4, "size": 24, "latent": 32, "rotated": 8}
WRITES = [
    *((op, layout) for op in ("rope_kv_write", "qk_norm_rope_kv_write") for layout in QUANTIZED),
    *(("latent_rope_kv_write", layout) for layout in QUANTIZED_LATENT),
]


def test_forms_are_those_of_the_layouts() -> None:
    names = {"i8": "u8"}
    told = {
        layout: tuple(Form(names.get(f.codes, f.codes) if f.least else f.codes, f.group, f.fixed) for f in forms)  # type: ignore[arg-type]
        for layout, forms in FORMS.items()
    }
    assert told == QUANTIZED
    assert {LATENT: Form("e4m3", group=LATENT_GROUP)} == QUANTIZED_LATENT


def context(op: str, layout: str, **device: int) -> OpContext:
    shape = ROW if op == "latent_rope_kv_write" else HEADS
    return OpContext(op=op, device=replace(H200, **device), dtype="bf16", layout=layout, bucket=1, shape=shape)  # type: ignore[arg-type]


@pytest.mark.parametrize(("op", "layout"), WRITES)
def test_every_layout_is_written_by_a_kernel(op: str, layout: str) -> None:
    registry = registry_of()
    assert resolve(candidates_for(registry, op), context(op, layout), {}, ()).chosen.name == "triton"


@pytest.mark.parametrize(("op", "layout"), [write for write in WRITES if "fp8" in write[1]])
def test_fp8_needs_a_gpu_that_converts_it(op: str, layout: str) -> None:
    [kernel] = [spec for spec, _ in candidates_for(registry_of(), op) if spec.name == "triton"]
    assert why_not(kernel, context(op, layout, capability=89)) is None
    assert "compute capability 89" in str(why_not(kernel, context(op, layout, capability=86)))
    assert why_not(kernel, context(op, "mla-latent" if op.startswith("latent") else "token", capability=86)) is None
