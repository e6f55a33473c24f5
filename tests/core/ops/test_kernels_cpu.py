"""Every op's torch kernel and CPU kernel against the op's meaning, in each dtype and token bucket."""

from __future__ import annotations

import importlib
from dataclasses import asdict, replace

import pytest
from llmcore.api.models import AttnSpec
from llmcore.api.specs import DeviceInfo, KernelSpec, OpContext
from llmcore.builtin.cpu import attention, register_kernels
from llmcore.builtin.ops import register_ops
from llmcore.ops import made
from llmcore.registry.loader import load
from llmcore.registry.resolve import REFERENCE, why_not
from llmcore_devtools.kernels.compare import check

CPU = DeviceInfo("cpu")
OPS = {spec.name: spec for spec in register_ops() if spec.name != "sample"}
KERNELS = [spec for spec in register_kernels() if spec.op in OPS]

SPECS = {
    "odd groups": AttnSpec(heads=9, kv_heads=3, key_size=16, value_size=16, scale=0.25),
    "one head": AttnSpec(heads=5, kv_heads=1, key_size=8, value_size=8, scale=0.3),
    "window": AttnSpec(heads=4, kv_heads=4, key_size=16, value_size=16, scale=0.25, window=5),
}


def context(op: str, dtype: str = "f32", bucket: int = 1, granule: int = 1, **shape: object) -> OpContext:
    attention = op.startswith("attn.gqa")
    layout = "token" if attention else None
    return OpContext(op=op, device=CPU, dtype=dtype, layout=layout, granule=granule, bucket=bucket, shape=shape)


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("op", OPS)
def test_torch_kernel(op: str, dtype: str) -> None:
    module = importlib.import_module(OPS[op].module)
    torch_kernel = KernelSpec(name=REFERENCE, op=op, make=f"{OPS[op].module}:make")
    layout = next(iter(getattr(module, "LAYOUTS", ())), None)
    for bucket in range(5):
        for shape in getattr(module, "SHAPES", ({},)):
            where = replace(context(op, dtype, bucket, **shape), layout=layout)
            assert check(module, made(torch_kernel, where), where) > 0


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("kernel", [k for k in KERNELS if not k.op.startswith("attn.gqa")], ids=lambda k: k.op)
def test_cpu_kernel(kernel, dtype: str) -> None:
    module = importlib.import_module(OPS[kernel.op].module)
    for bucket in range(5):
        where = context(kernel.op, dtype, bucket, **({"size": 16, "rotated": 16} if kernel.op == "rope" else {}))
        if why_not(kernel, where) is None:
            assert check(_whole_heads(module), load(kernel.make)(where), where) > 0


def _whole_heads(module):
    """The rope module without the samples that turn half a head, which the CPU kernel declines."""
    if not module.__name__.endswith(".rope"):
        return module

    class Whole:
        TOLERANCE, reference = module.TOLERANCE, staticmethod(module.reference)

        @staticmethod
        def samples(where):
            return (s for s in module.samples(where) if s[0].shape[-1] == s[1].shape[-1])

    return Whole


@pytest.mark.parametrize("granule", [1, 4])
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("kernel", [k for k in KERNELS if k.op.startswith("attn.gqa")], ids=lambda k: k.op)
def test_attention_kernel(kernel, dtype: str, spec: AttnSpec, granule: int) -> None:
    where = context(kernel.op, dtype, granule=granule, **asdict(spec))
    assert why_not(kernel, where) is None
    assert check(importlib.import_module(OPS[kernel.op].module), load(kernel.make)(where), where) > 0


@pytest.mark.parametrize("short", [0, 256])
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_prefill_in_blocks(spec: AttnSpec, short: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of a few queries, in bf16 and in f32."""
    monkeypatch.setattr(attention, "BLOCK", 3)
    monkeypatch.setattr(attention, "SHORT", short)
    where = context("attn.gqa.prefill", "bf16", granule=4, **asdict(spec))
    module = importlib.import_module(OPS["attn.gqa.prefill"].module)
    assert check(module, attention.Prefill(where), where) > 0


def test_a_kernel_that_reads_too_far_is_caught() -> None:
    where = context("attn.gqa.decode", **asdict(SPECS["odd groups"]))
    module = importlib.import_module(OPS["attn.gqa.decode"].module)

    class TooFar:
        def __init__(self) -> None:
            self.real = module.make(where)
            self.workspace, self.plan = self.real.workspace, self.real.plan

        def run(self, q, k_new, v_new, kv, meta, out, lse=None):
            return self.real.run(q, k_new, v_new, kv, {**meta, "kv_len": meta["kv_len"] + 1}, out, lse)

    with pytest.raises(AssertionError, match="read that must not be"):
        check(module, TooFar(), where)


def test_sdpa_declines_what_it_cannot() -> None:
    sdpa = next(k for k in KERNELS if k.op == "attn.gqa.decode")
    capped = AttnSpec(heads=4, kv_heads=4, key_size=16, value_size=16, scale=1.0, soft_cap=30.0)
    assert "soft cap" in str(why_not(sdpa, context(sdpa.op, **asdict(capped))))
