"""The kernels for mixtures with quantized experts against their ops' references, in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from llmcore.api.specs import DeviceInfo, OpContext
from llmcore.ops import drawing
from llmcore.registry.resolve import why_not
from llmcore_devtools.kernels.compare import compare
from llmcore_quantization.canonical import Scheme
from llmcore_quantization.ops import moe_experts_w4a16, moe_experts_w8a16, moe_fused_w4a16, moe_fused_w8a16
from llmcore_triton.moe import experts as plain
from llmcore_triton.quantized import experts, fused
from llmcore_triton.specs.quantized import expert_kernels

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::DeprecationWarning")

CPU = torch.device("cpu")
H200 = DeviceInfo("cuda", "NVIDIA H200", capability=90, processors=132)
SPECS = {spec.op: spec for spec in expert_kernels()}
QWEN3 = {"experts": 128, "top_k": 8, "size": 2048, "inner": 768}


@pytest.fixture(autouse=True)
def _poisoned() -> Iterator[None]:
    """What a kernel does not write is NaN."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(before)


def context(op: str, dtype: str = "f16", bucket: int = 1, **shape: Any) -> OpContext:
    return OpContext(op=op, device=H200, dtype=dtype, bucket=bucket, shape=shape)  # type: ignore[arg-type]


def check(module: Any, kernel: Any, where: OpContext, tokens: int, packs: bool = True, last: bool = True) -> None:
    """One of the op's samples, whose weights the kernel has packed before (`packs`) or packs itself."""
    with drawing(5, CPU, tokens):
        samples = list(module.samples(where))
    sample = samples[-1 if last else 0]

    def run(*given: Any) -> Any:
        if packs:
            given = tuple(kernel.pack(*one)[:3] if isinstance(one, tuple) and len(one) == 3 else one for one in given)
        return kernel(*given)

    compare(module, run, where, sample, CPU)


SHAPES = [(module, shape) for module in (moe_experts_w4a16, moe_experts_w8a16) for shape in module.SHAPES]


@pytest.mark.parametrize(("module", "shape"), SHAPES, ids=str)
def test_samples_of_experts(module: Any, shape: dict[str, Any]) -> None:
    """Tiles of few and of many pairs, with and without TMA, rows that end within a block, and pairs left alone."""
    op = f"moe.experts.{module.__name__[-5:]}"
    for dtype, bucket, tokens, config in (("f32", 1, 2, {}), ("f16", 4, 9, {"tma": False})):
        where = context(op, dtype, bucket, **shape)
        assert why_not(SPECS[op], where) is None
        check(module, experts.make_with(where, config), where, tokens, last=dtype == "f32")


FUSED = [(module, shape) for module in (moe_fused_w4a16, moe_fused_w8a16) for shape in module.SHAPES]


@pytest.mark.parametrize(("module", "shape"), FUSED, ids=str)
def test_samples_of_fused(module: Any, shape: dict[str, Any]) -> None:
    """Also beside a shared MLP with plain weights; canonical codes are packed when they come."""
    op = f"moe.fused.{module.__name__[-5:]}"
    for dtype, bucket, tokens in (("f32", 0, 1), ("f16", 1, 5)):
        where = context(op, dtype, bucket, **shape)
        assert why_not(SPECS[op], where) is None
        check(module, fused.make(where), where, tokens, packs=dtype == "f16")


@pytest.mark.parametrize("group", [48, 96])
def test_groups_that_are_no_power_of_two(group: int) -> None:
    """Of a block's parts one or two at a time share a scale."""
    scheme = Scheme(codes="u4", group=group, zeros=True)
    shape = {"experts": 3, "top_k": 2, "size": 192, "inner": 96, **moe_experts_w4a16.told(scheme)}
    for op, module, made, bucket in (
        ("moe.experts.w4a16", moe_experts_w4a16, experts.make, 1),
        ("moe.fused.w4a16", moe_fused_w4a16, fused.make, 0),
    ):
        where = context(op, "f16", bucket, **shape)
        assert why_not(SPECS[op], where) is None
        check(module, made(where), where, 1)


def test_long_tiles() -> None:
    """So many pairs for each expert that some tiles of the last bucket are full."""
    scheme = Scheme(codes="u4", group=32, zeros=True)
    shape = {"experts": 2, "top_k": 2, "size": 64, "inner": 64, **moe_experts_w4a16.told(scheme)}
    where = context("moe.experts.w4a16", "f16", 4, **shape)
    check(moe_experts_w4a16, experts.make(where), where, 140)


def test_deterministic() -> None:
    """One tile and one order for all buckets."""
    shape = moe_experts_w4a16.SHAPES[0]
    some = [replace(context("moe.experts.w4a16", bucket=n, **shape), deterministic=True) for n in range(5)]
    assert all(experts.default(where) == experts.default(some[0]) for where in some)
    assert SPECS["moe.experts.w4a16"].batch_invariant and not SPECS["moe.fused.w4a16"].batch_invariant
    check(moe_experts_w4a16, experts.make(some[0]), some[0], 3)


@pytest.mark.parametrize("codes", ["u4", "i8", "e4m3"])
def test_every_configuration_fits_into_shared_memory(codes: str) -> None:
    scheme = Scheme(codes=codes, group=128, scale="bf16", zeros=codes == "u4")  # type: ignore[arg-type]
    for bucket in range(5):
        where = context("moe.experts", "bf16", bucket, **QWEN3, **moe_experts_w4a16.told(scheme))
        configs = list(experts.candidates(where))
        assert configs[0] == experts.default(where) and 1 < len(configs) <= 24
        for config in configs:
            for gated, name in ((True, "gate_up"), (False, "down")):
                assert plain.most_stages(where, plain.Tile(*config[name]), gated) >= 2


def test_what_is_declined() -> None:
    shape = moe_experts_w4a16.SHAPES[0]
    for change in ({"group": 24}, {"scale_type": "f32"}, {"experts": 257}):
        assert why_not(SPECS["moe.experts.w4a16"], context("moe.experts.w4a16", **{**shape, **change}))
    assert why_not(SPECS["moe.fused.w4a16"], context("moe.fused.w4a16", bucket=2, **shape))
