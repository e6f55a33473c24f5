"""The linears over codes of 8 bits against their ops' references, in Triton's interpreter."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from llmcore.api.specs import DeviceInfo, OpContext
from llmcore.ops import DTYPES
from llmcore_devtools.kernels.compare import check
from llmcore_quantization.ops import linear_fp8_block, linear_w8a8
from llmcore_quantization.rounding import restored
from llmcore_triton.quantized import (
    blocks,
    codes_cublas,
    codes_cublas_unscaled,
    codes_finish,
    codes_many_rows,
    codes_small_rows,
)

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::DeprecationWarning")

H200 = DeviceInfo("cuda", "NVIDIA H200", capability=90, processors=132)
TYPES = {"i8": torch.int8, "e4m3": torch.float8_e4m3fn}
TOLERANCE = {"f32": 1e-5, "f16": 1e-3, "bf16": 8e-3}
ROWS, GROUPS = "linear.w8a8", "linear.fp8_block"
FORMS = [(ROWS, "i8"), (ROWS, "e4m3"), (GROUPS, "e4m3")]

MODULES: dict[str, Any] = {ROWS: linear_w8a8, GROUPS: linear_fp8_block}
SAMPLES = [(op, shape) for op, module in MODULES.items() for shape in module.SHAPES]

Case = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def context(op: str, codes: str, inputs: int, outputs: int, dtype: str = "f16", **more: Any) -> OpContext:
    shape = {"inputs": inputs, "outputs": outputs, "bias": True, "codes": codes, "group": 128 if op == GROUPS else 0}
    given = {"bucket": 1, "device": H200, **more}
    return OpContext(op=op, dtype=dtype, shape=shape, **given)  # type: ignore[arg-type]


def case(where: OpContext, tokens: int) -> Case:
    """Returns codes and scales of inputs and of a weight, and a bias. x lies amid rows of other values."""
    generator = torch.Generator().manual_seed(tokens)
    inputs, outputs = int(where.shape["inputs"]), int(where.shape["outputs"])  # type: ignore[call-overload]
    groups = inputs // 128 if where.op == GROUPS else 1

    def codes(rows: int) -> torch.Tensor:
        drawn = torch.randn(rows, inputs, generator=generator) * 30
        kind = TYPES[str(where.shape["codes"])]
        return (drawn.round().clamp(-128, 127) if kind == torch.int8 else drawn).to(kind)

    def scale(rows: int) -> torch.Tensor:
        return torch.rand(rows, groups, generator=generator) / 100 + 1e-3

    bias = torch.randn(outputs, generator=generator).to(DTYPES[where.dtype])
    return codes(tokens + 2)[1:-1], scale(tokens), codes(outputs), scale(outputs), bias


def agree(kernel: Any, where: OpContext, given: Case, spread: bool = False, biased: bool = True) -> None:
    x, x_scale, codes, scale, bias = given
    some = bias if biased else None
    got = kernel(x, x_scale, codes, scale, some)
    assert got.dtype == DTYPES[where.dtype] and got.shape == (len(x), len(codes))
    canonical = scale.repeat_interleave(128, dim=0) if spread else scale
    right = MODULES[where.op].make(where)(x, x_scale, codes, canonical, some)
    allowed = TOLERANCE[where.dtype] * max(float(right.abs().max()), 1.0)
    torch.testing.assert_close(got, right, rtol=0.0, atol=allowed)


@pytest.mark.parametrize(("op", "shape"), SAMPLES)
@pytest.mark.parametrize("dtype", ["f32", "f16"])
def test_samples(op: str, shape: Any, dtype: str) -> None:
    """The ops' own: ragged sizes, tokens without any input."""
    for bucket in range(3):
        where = OpContext(op=op, device=H200, dtype=dtype, bucket=bucket, shape=shape)  # type: ignore[arg-type]
        assert check(MODULES[op], codes_small_rows.make(where), where) > 0


@pytest.mark.parametrize(("op", "codes"), FORMS)
@pytest.mark.parametrize(
    ("tma", "early", "per_processor"),
    [(False, "", 1), (False, "registers", 1), (True, "", 1), (True, "registers", 0), (True, "shared", 1)],
)
def test_small_rows(op: str, codes: str, tma: bool, early: str, per_processor: int) -> None:
    """Tiles that several programs share or that have one each, and that reach over the ends."""
    config = {"block_n": 16, "block_k": 64, "tma": tma, "early": early, "per_processor": per_processor}
    where = context(op, codes, 256 if op == GROUPS else 208, 44, device=replace(H200, processors=4))
    agree(codes_small_rows.make_with(where, config), where, case(where, 17), biased=tma)


@pytest.mark.parametrize(("op", "codes"), FORMS)
def test_any_number_of_tokens(op: str, codes: str) -> None:
    """With the default configuration, more tokens than a kernel is compiled for, and ragged inputs."""
    inputs = 128 if op == GROUPS else 72
    where = context(op, codes, inputs, 51, "f32", bucket=0)
    agree(codes_small_rows.make(where), where, case(where, 65))
    where = replace(where, bucket=3, device=replace(H200, processors=2))
    agree(codes_small_rows.make(where), where, case(where, 130), biased=False)
    where = replace(where, bucket=1, device=replace(H200, capability=89))
    agree(codes_small_rows.make(where), where, case(where, 3))


def test_a_scale_for_all_tokens() -> None:
    """One that is repeated without memory of its own."""
    where = context(ROWS, "i8", 64, 48)
    x, _, *others = case(where, 7)
    one = torch.full((1, 1), 0.01).expand(7, 1)
    agree(codes_small_rows.make(where), where, (x, one, *others))  # type: ignore[arg-type]
    agree(codes_many_rows.make(replace(where, bucket=4)), where, (x, one, *others))  # type: ignore[arg-type]


@pytest.mark.parametrize(("op", "codes"), FORMS)
@pytest.mark.parametrize("processors", [1, 100])
def test_many_rows(op: str, codes: str, processors: int) -> None:
    """Tiles that reach over every end, several to a program or less than one."""
    config = {"block_m": 32, "block_n": 32, "block_k": 64, "group": 2}
    inputs = 256 if op == GROUPS else 208
    where = context(op, codes, inputs, 72, bucket=3, device=replace(H200, processors=processors))
    kernel = codes_many_rows.make_with(where, config)
    given = case(where, 70)
    for biased in (True, False):
        agree(kernel, where, given, biased=biased)
    x, *others = given
    apart = torch.cat((x, x), dim=1)[:, :inputs]
    agree(kernel, where, (apart, *others))
    assert len(kernel._weights) == 1


@pytest.mark.parametrize(("op", "codes"), FORMS)
def test_programs_that_share_a_tile(op: str, codes: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal calls give equal bits, whatever was in the memory for parts. More tokens have fewer programs to a tile."""
    monkeypatch.setattr(codes_many_rows, "_LAUNCH", 0)
    config = {"block_m": 32, "block_n": 32, "block_k": 64, "group": 2, "parts": 3}
    inputs = 640 if op == GROUPS else 400
    where = context(op, codes, inputs, 72, bucket=3, device=replace(H200, processors=18))
    kernel = codes_many_rows.make_with(where, config)
    given = case(where, 33)
    first = kernel(*given)
    assert kernel._parts == {6: 3}
    kernel._sums.fill_(1 << 30)
    agree(kernel, where, given)
    assert torch.equal(kernel(*given), first)
    agree(kernel, where, case(where, 70), biased=False)
    assert kernel._parts == {6: 3, 9: 2}


def test_how_many_programs_share_a_tile() -> None:
    """No more than run at once or than there are steps, and one where the second launch takes longer."""
    where = context(ROWS, "e4m3", 14336, 4096, bucket=3)
    kernel = codes_many_rows.make_with(where, {})
    assert [kernel.parts_of(tiles) for tiles in (32, 64, 128, 1000)] == [4, 2, 1, 1]
    assert codes_many_rows.make_with(where, {"parts": 1}).parts_of(32) == 1
    assert codes_many_rows.make_with(context(ROWS, "e4m3", 1024, 4096, bucket=3), {}).parts_of(32) == 1
    assert codes_many_rows.make_with(where, {"block_k": 8192}).parts_of(8) <= 2


def test_scales_of_blocks() -> None:
    where = context(GROUPS, "e4m3", 256, 256, bucket=3)
    x, x_scale, codes, scale, bias = case(where, 21)
    blocked = scale[::128].contiguous()
    packed = blocks.pack(codes, blocked.repeat_interleave(128, dim=0))
    assert packed[0] is codes
    torch.testing.assert_close(packed[1], blocked, rtol=0.0, atol=0.0)
    assert blocks.pack(*packed)[1] is packed[1]
    for odd in (scale, scale[:130]):
        assert blocks.pack(codes[: len(odd)], odd)[1] is odd
    for kernel in (codes_small_rows.make(replace(where, bucket=1)), codes_many_rows.make(where)):
        assert kernel.packing == "blocks"
        agree(kernel, where, (x, x_scale, codes, blocked, bias), spread=True)
    assert not hasattr(codes_small_rows.make(context(ROWS, "i8", 64, 64)), "packing")


def _torch_scales_rows() -> bool:
    """Returns False for torch 2.11, whose product of codes on the CPU takes one scale for all rows."""
    codes = torch.ones(16, 16).to(torch.float8_e4m3fn)
    try:
        torch._scaled_mm(codes, codes.t(), torch.ones(16, 1), torch.ones(1, 16), out_dtype=torch.bfloat16)
    except RuntimeError:
        return False
    return True


@pytest.mark.skipif(not _torch_scales_rows(), reason="this torch does not scale rows on the CPU")
def test_rows_by_cublas() -> None:
    where = context(ROWS, "e4m3", 64, 48, "bf16")
    kernel = codes_cublas.make_with(where, next(codes_cublas.candidates(where)))
    for biased in (True, False):
        agree(kernel, where, case(where, 5), biased=biased)


def test_unscaled_by_cublas() -> None:
    """With codes whose products f16 can hold, because the interpreter has no bf16."""
    where = context(ROWS, "e4m3", 64, 1040, "f16")
    x, x_scale, codes, scale, bias = case(where, 5)
    given = x, x_scale * 16, (codes.float() / 16).to(codes.dtype), scale, bias
    kernel = codes_cublas_unscaled.make_with(where, next(codes_cublas_unscaled.candidates(where)))
    for biased in (True, False):
        agree(kernel, where, given, biased=biased)
    assert codes_many_rows.DEFAULT["parts"] == codes_finish.MOST


@pytest.mark.parametrize("tokens", [4, 7])
def test_blocks_by_cublas(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch has this product for GPUs alone. Its place takes a function that has the same requirements."""
    monkeypatch.setattr(F, "scaled_mm", _scaled_mm)
    where = context(GROUPS, "e4m3", 512, 256, "bf16")
    x, x_scale, codes, scale, bias = case(where, tokens)
    kernel = codes_cublas.make(where)
    agree(kernel, where, (x, x_scale, codes, scale, bias))
    agree(kernel, where, (x, x_scale, codes, scale[::128].contiguous(), bias), spread=True, biased=False)


def _scaled_mm(
    x: torch.Tensor, w: torch.Tensor, x_scale: torch.Tensor, by_x: Any, scale: torch.Tensor, by_w: Any, **more: Any
) -> torch.Tensor:
    tokens, groups, kinds = len(x), len(w) // 128, F.ScalingType
    assert tokens % 4 == 0 and x.is_contiguous() and w.t().is_contiguous() and by_x == kinds.BlockWise1x128
    assert x_scale.shape == (tokens, groups) and x_scale.stride() == (1, tokens)
    if by_w == kinds.BlockWise128x128:
        assert scale.shape == (groups, w.shape[1] // 128) and scale.stride() == (1, groups) and groups % 4 == 0
        scale = scale.t().repeat_interleave(128, dim=0)
    assert scale.shape == (w.shape[1], groups)
    assert by_w == kinds.BlockWise128x128 or scale.stride() == (1, len(scale))
    return F.linear(restored(x, x_scale), restored(w.t(), scale)).to(more["output_dtype"])


@pytest.mark.parametrize(("op", "codes"), FORMS)
@pytest.mark.parametrize("capability", [86, 90])
def test_every_configuration_fits(op: str, codes: str, capability: int) -> None:
    """Into shared memory, with a number of them that a tuning run has time for."""
    device = replace(H200, capability=capability)
    for inputs, outputs in ((4096, 6144), (14336, 4096)):
        for bucket in range(5):
            where = context(op, codes, inputs, outputs, "bf16", bucket=bucket, device=device)
            if bucket > 2 and capability == 90:
                many = list(codes_many_rows.candidates(where))
                assert 5 <= len(many) <= 8
                for config in [codes_many_rows.default(where), *many]:
                    m, n, step = config["block_m"], config["block_n"], config["block_k"]
                    beside, alone = codes_many_rows.stages_of(where, config)
                    assert 2 <= beside <= alone
                    used = max(beside * (m + n) * step + 2 * m * n, alone * (m + n) * step, 4 * m * n)
                    assert config["per_processor"] * (used + 2048) <= 228 * 1024
            if bucket < 4:
                few = list(codes_small_rows.candidates(where))
                assert (3 if bucket < 3 and capability == 90 else 1) <= len(few) <= (8 if capability == 90 else 24)
                for config in few:
                    codes_small_rows.make_with(where, config)
                codes_small_rows.make(where)


def test_counters_are_left_as_they_were_found() -> None:
    where = context(ROWS, "i8", 192, 40, device=replace(H200, processors=5))
    kernel = codes_small_rows.make_with(where, {"block_n": 16, "block_k": 32, "per_processor": 1})
    given = case(where, 7)
    first = kernel(*given)
    plans = kernel.kernel._plans.values()
    assert any(plan.partials.numel() > 1 for plan in plans)
    for plan in plans:
        assert not plan.arrivals.any()
        plan.partials.fill_(torch.nan)
    assert torch.equal(kernel(*given), first)
