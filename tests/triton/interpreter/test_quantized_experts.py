"""The kernels for mixtures with quantized experts against their ops' references, in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from llmcore.api.specs import DeviceInfo, OpContext
from llmcore.ops import drawing
from llmcore.registry.resolve import why_not
from llmcore_devtools.kernels.compare import compare
from llmcore_quantization.canonical import Scheme
from llmcore_quantization.ops import moe_experts_w4a16, moe_experts_w8a16, moe_fused_w4a16, moe_fused_w8a16
from llmcore_triton.moe import experts as plain
from llmcore_triton.quantized import experts, fused
from llmcore_triton.specs.quantized import expert_kernels
from llmcore_triton.specs.rows import NAME

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::DeprecationWarning")

CPU = torch.device("cpu")
H200 = DeviceInfo("cuda", "NVIDIA H200", capability=90, processors=132)
SPECS = {spec.op: spec for spec in expert_kernels() if spec.name == NAME}
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
    for dtype, bucket, tokens, config in (("f32", 1, 2, {}), ("f16", 1, 9, {"tma": False}), ("f16", 4, 9, {})):
        where = context(op, dtype, bucket, **shape)
        assert why_not(SPECS[op], where) is None
        check(module, experts.make_with(where, config), where, tokens, last=dtype == "f32")


FUSED = [(module, shape) for module in (moe_fused_w4a16, moe_fused_w8a16) for shape in module.SHAPES]


@pytest.mark.parametrize(("module", "shape"), FUSED, ids=str)
def test_samples_of_fused(module: Any, shape: dict[str, Any]) -> None:
    """Also beside a shared MLP with plain weights. Codes are packed when they come. One token in both ways."""
    op = f"moe.fused.{module.__name__[-5:]}"
    for dtype, bucket, tokens in (("f32", 0, 1), ("f16", 0, 1), ("f16", 1, 5)):
        where = context(op, dtype, bucket, **shape)
        assert why_not(SPECS[op], where) is None
        kernel = fused.make_with(where, fused.default(where)) if dtype == "f32" else fused.make(where)
        check(module, kernel, where, tokens, packs=dtype == "f16")


ONE = {"experts": 5, "top_k": 3, "size": 320, "inner": 96}
"""Rows whose last block is not whole, and more blocks than are multiplied in a step."""


@pytest.mark.parametrize(("codes", "group", "scale", "zeros"), [
    *(("u4", 32, "f16", True), ("u4", 0, "bf16", True), ("u4", 32, "f32", False)),
    *(("i8", 32, "f16", True), ("i8", 0, "bf16", True), ("e4m3", 0, "f32", False), ("e4m3", 32, "bf16", False)),
])  # fmt: skip
def test_one_token_in_several_steps(codes: str, group: int, scale: str, zeros: bool) -> None:
    module = moe_fused_w4a16 if codes == "u4" else moe_fused_w8a16
    scheme = Scheme(codes=codes, group=group, scale=scale, zeros=zeros)  # type: ignore[arg-type]
    where = context(f"moe.fused.{module.__name__[-5:]}", "f16", 0, **ONE, **moe_experts_w4a16.told(scheme))
    for together, ahead in ((2, 1), (4, 2)):
        config = {"gate_up": [8, together, 1], "down": [16, together, 1], "ahead": ahead}
        check(module, fused.make_with(where, config), where, 1)


@pytest.mark.parametrize(("codes", "zeros"), [("u4", True), ("i8", True), ("e4m3", False)])
def test_one_token_in_bf16(codes: str, zeros: bool) -> None:
    """Its zeros have bits of their own. The interpreter has no product of bf16, so the router's choice is given."""
    module = moe_fused_w4a16 if codes == "u4" else moe_fused_w8a16
    scheme = Scheme(codes=codes, group=32, scale="f16", zeros=zeros)  # type: ignore[arg-type]
    where = context(f"moe.fused.{module.__name__[-5:]}", "bf16", 0, **ONE, **moe_experts_w4a16.told(scheme))
    with drawing(5, CPU, 1):
        x, _, _, gate_up, down, *_ = next(iter(module.samples(where)))
    one = fused.OneToken(where, {"gate_up": [8, 4, 1], "down": [16, 4, 1], "ahead": 2})
    shares, chosen = torch.tensor([[0.5, 0.3, 0.2]]), torch.tensor([[4, 0, 2]], dtype=torch.int32)
    packed = experts.Packed(where)
    found = one(x, shares, chosen, packed.words(gate_up), packed.words(down), None, None)
    both, last = (moe_experts_w4a16.plain(stack, torch.float32)[chosen[0]] for stack in (gate_up, down))
    gate, up = (x.float() @ both.mT).chunk(2, -1)
    middle = (F.silu(gate) * up).to(x.dtype).float()
    expected = (shares[0, :, None, None] * (middle @ last.mT)).sum(0)
    torch.testing.assert_close(found.float(), expected, rtol=0, atol=1e-2 * float(expected.abs().max()))


@pytest.mark.parametrize("size", [84, 70])
def test_one_token_of_odd_sizes(size: int) -> None:
    """Rows that end within a chunk, and outputs that programs do not divide."""
    shape = {**ONE, "size": size, "inner": 38, **moe_experts_w4a16.told(Scheme(codes="u4"))}
    where = context("moe.fused.w4a16", "f16", 0, **shape)
    config = {"gate_up": [16, 1, 1], "down": [32, 1, 1], "ahead": 2}
    check(moe_fused_w4a16, fused.make_with(where, config), where, 1)


def test_one_token_has_two_ways() -> None:
    """The default one and that in tiles, which kernels for more tokens have too. Both take any number of tokens."""
    where = context("moe.fused.w4a16", "f16", 0, **moe_fused_w4a16.SHAPES[1])
    for config in (fused.default(where), fused.default(replace(where, bucket=1))):
        assert config in list(fused.candidates(where))
        for tokens in (1, 3):
            check(moe_fused_w4a16, fused.make_with(where, config), where, tokens)
    where = replace(where, bucket=1)
    check(moe_fused_w4a16, fused.make(where), where, 1)


@pytest.mark.parametrize("group", [48, 96])
def test_groups_that_are_no_power_of_two(group: int) -> None:
    """Of a block's parts one or two at a time share a scale."""
    scheme = Scheme(codes="u4", group=group, zeros=True)
    shape = {"experts": 3, "top_k": 2, "size": 192, "inner": 96, **moe_experts_w4a16.told(scheme)}
    for op, module, own, bucket in (
        ("moe.experts.w4a16", moe_experts_w4a16, experts, 1),
        ("moe.fused.w4a16", moe_fused_w4a16, fused, 0),
    ):
        where = context(op, "f16", bucket, **shape)
        assert why_not(SPECS[op], where) is None
        check(module, own.make_with(where, own.default(where)), where, 1)


@pytest.mark.parametrize(("size", "inner"), [(2048, 768), (7168, 2048), (2048, 1408), (64, 64), (16384, 512)])
def test_configurations_for_one_token(size: int, inner: int) -> None:
    """Few enough to time, all different, the default first; a step fills the warps, and down loads what exists."""
    for codes in ("u4", "e4m3"):
        scheme = Scheme(codes=codes, group=32)  # type: ignore[arg-type]
        shape = {**QWEN3, "size": size, "inner": inner, **moe_experts_w4a16.told(scheme)}
        where = context("moe.fused.w4a16" if codes == "u4" else "moe.fused.w8a16", "bf16", 0, **shape)
        configs = [config for config in fused.candidates(where) if "tma" not in config]
        assert configs[0] == fused.default(where) and 1 < len(configs) <= 60
        assert all(config not in configs[:i] for i, config in enumerate(configs))
        chunks = experts.of_rows(where, "inner").blocks.words // 8
        blocks = 8 * experts.of_rows(where, "inner").blocks.total
        for _, together, warps in (config["down"] for config in configs):
            assert warps == 1 or together * chunks >= 32 * warps
        assert all(0 < (one["ahead"] - 1) * one["down"][1] < blocks for one in configs if one["ahead"] > 1)


@pytest.mark.parametrize("tma", [False, True])
def test_long_tiles(tma: bool) -> None:
    """So many pairs for each expert that some tiles of the last bucket are full."""
    scheme = Scheme(codes="u4", group=32, zeros=True)
    shape = {"experts": 2, "top_k": 2, "size": 64, "inner": 64, **moe_experts_w4a16.told(scheme)}
    where = context("moe.experts.w4a16", "f16", 4, **shape)
    check(moe_experts_w4a16, experts.make_with(where, {"tma": tma}), where, 140)


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
