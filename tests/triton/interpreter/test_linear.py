"""The kernels for linears against their ops' references, in Triton's interpreter."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from llmcore.api.specs import DeviceInfo, OpContext
from llmcore.ops import DTYPES, linear, linear_silu_and_mul
from llmcore_devtools.kernels.compare import check
from llmcore_triton import linear as small_rows
from llmcore_triton import linear_cublas, linear_fixed, linear_gated, linear_gemv
from llmcore_triton.linear_shapes import Sizes, buffer

# exp overflows for gates far below zero, and means to
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::DeprecationWarning")

H200 = DeviceInfo("cuda", "NVIDIA H200", capability=90, processors=132)
MODULES = {"linear": linear, "linear_silu_and_mul": linear_silu_and_mul}
SHARED = {"block_n": 16, "block_k": 16, "per_processor": 1}
"""So many programs that they share tiles."""


def context(op: str = "linear", dtype: str = "f32", bucket: int = 1, **more: Any) -> OpContext:
    return OpContext(op=op, device=more.pop("device", H200), dtype=dtype, bucket=bucket, **more)  # type: ignore[arg-type]


def case(tokens: int, outputs: int, inputs: int, dtype: str = "f32", seed: int = 0) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    sizes = ((tokens, inputs), (outputs, inputs), (outputs,))
    x, weight, bias = (torch.randn(*size, generator=generator).to(DTYPES[dtype]) for size in sizes)
    return x, weight / 4, bias


def close(got: torch.Tensor, expected: torch.Tensor, dtype: str = "f32") -> None:
    allowed = linear.TOLERANCE[dtype] * max(float(expected.abs().max()), 1.0)
    torch.testing.assert_close(got, expected, rtol=0.0, atol=allowed)


@pytest.mark.parametrize("dtype", ["f32", "f16"])
@pytest.mark.parametrize("op", MODULES)
@pytest.mark.parametrize("module", [small_rows, linear_gemv], ids=["small_rows", "gemv"])
def test_samples(module: Any, op: str, dtype: str) -> None:
    for bucket in range(3) if module is small_rows else (0,):
        where = context(op, dtype, bucket, shape={"inputs": 72, "outputs": 51, "size": 51})
        assert check(MODULES[op], module.make(where), where) > 0


@pytest.mark.parametrize("dtype", ["f32", "f16"])
def test_fixed_samples(dtype: str) -> None:
    for bucket in range(5):
        where = context("linear", dtype, bucket, deterministic=True)
        assert check(linear, linear_fixed.make(where), where) > 0


@pytest.mark.parametrize("op", MODULES)
@pytest.mark.parametrize(
    ("processors", "early"), [(1, "registers"), (3, ""), (7, ""), (7, "registers"), (64, "shared"), (64, "")]
)
def test_programs_that_share_tiles(op: str, processors: int, early: str) -> None:
    """Tiles that begin in one program and end in another, whole ones between them, and many programs on one tile."""
    where = context(op, device=replace(H200, processors=processors))
    kernel = small_rows.make_with(where, {**SHARED, "early": early})
    for tokens, outputs, inputs in ((1, 32, 64), (16, 30, 100), (17, 48, 130), (64, 16, 256)):
        x, weight, bias = case(tokens, outputs * (1 + (op != "linear")), inputs)
        for given in (None, bias):
            close(kernel(x, weight, given), MODULES[op].reference(x, weight, given))


@pytest.mark.parametrize("op", MODULES)
@pytest.mark.parametrize(("per_processor", "early"), [(0, ""), (0, "registers"), (1, "shared"), (1, "registers")])
def test_tiles_by_tma(op: str, per_processor: int, early: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles that reach over the ends of x and weight, x with NaN around it; what is not aligned comes by pointers."""
    read = []
    describe = small_rows.descriptors
    monkeypatch.setattr(small_rows, "descriptors", lambda *given: read.append(describe(*given)) or read[-1])
    where = context(op, "f16", device=replace(H200, processors=5))
    kernel = small_rows.make_with(where, {**SHARED, "per_processor": per_processor, "tma": True, "early": early})
    for tokens, outputs, inputs in ((1, 32, 64), (16, 30, 104), (17, 44, 136), (64, 16, 256)):
        x, weight, bias = case(tokens, outputs * (1 + (op != "linear")), inputs, "f16")
        wide = torch.full((tokens + 2, inputs + 32), torch.nan, dtype=torch.float16)
        for start in (8, 9):
            rows = wide[1:-1, start : start + inputs]
            rows.copy_(x)
            for given in (None, bias):
                close(kernel(rows, weight, given), MODULES[op].reference(x, weight, given), "f16")
                assert all((found is not None) == (start == 8) for found in read[-1])
            wide.fill_(torch.nan)
    assert all(len(plan.weights) == 1 for plan in kernel._plans.values())


MANY = {"block_m": 32, "block_n": 16, "block_k": 32, "group": 2}
"""Tiles that few tokens fill."""


@pytest.mark.parametrize("processors", [1, 4, 100])
def test_gate_and_up_in_one_product(processors: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles that reach over every end, several to a program or less than one, x and results with NaN around them."""
    monkeypatch.setattr(linear_gated, "WANTED", {3: 0.0})
    for tokens, size, inputs in ((65, 48, 64), (70, 40, 104), (128, 8, 8), (97, 56, 136)):
        shape = {"inputs": inputs, "size": size}
        where = context("linear_silu_and_mul", "f16", 3, device=replace(H200, processors=processors), shape=shape)
        kernel = linear_gated.make_with(where, MANY)
        x, weight, bias = case(tokens, 2 * size, inputs, "f16")
        wide = torch.full((tokens + 2, inputs + 32), torch.nan, dtype=torch.float16)
        rows = wide[1:-1, 8 : 8 + inputs]
        rows.copy_(x)
        for given in (None, bias):
            with monkeypatch.context() as poisoned:
                poisoned.setattr(torch.Tensor, "new_empty", _poisoned)
                got = kernel(rows, weight, given)
            close(got, linear_silu_and_mul.reference(x, weight, given), "f16")
        assert len(kernel._weights) == 1


def _poisoned(like: torch.Tensor, *size: int, **more: Any) -> torch.Tensor:
    return torch.full(size, torch.nan, dtype=like.dtype, **more)


def test_gated_samples() -> None:
    """The op's own: gates of both signs, so large that exp overflows."""
    for bucket in (3, 4):
        where = context("linear_silu_and_mul", "f16", bucket, device=replace(H200, processors=1))
        where = replace(where, shape={"inputs": 72, "size": 56, "bias": True})
        assert check(linear_silu_and_mul, linear_gated.make_with(where, {**MANY, "block_m": 64}), where) > 0


def test_what_tiles_do_not_fit_is_done_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few of many processors, rows that hardly begin a tile, and rows that TMA cannot read; but the first call."""
    launched = []
    shape = {"inputs": 64, "size": 64}
    where = context("linear_silu_and_mul", "f16", 3, device=replace(H200, processors=4), shape=shape)
    kernel = linear_gated.make_with(where, {**MANY, "block_m": 64})
    launch = kernel._launch.but
    monkeypatch.setattr(kernel._launch, "but", lambda **more: launched.append(more) or launch(**more))
    x, weight, _ = case(129, 128, 64, "f16")
    for tokens, fused in ((65, True), (64, True), (65, False), (102, False), (103, True), (128, True), (129, False)):
        close(kernel(x[:tokens], weight), linear_silu_and_mul.reference(x[:tokens], weight), "f16")
        assert bool(launched) == fused
        launched.clear()
    odd = torch.empty(128, 65, dtype=torch.float16)[:, 1:].copy_(x[:128])
    close(kernel(odd, weight), linear_silu_and_mul.reference(x[:128], weight), "f16")
    assert not launched


def test_counters_are_left_as_they_were_found() -> None:
    kernel = small_rows.make_with(context(device=replace(H200, processors=5)), SHARED)
    x, weight, bias = case(7, 40, 200)
    first = kernel(x, weight, bias)
    assert any(plan.partials.numel() > 1 for plan in kernel._plans.values())
    for plan in kernel._plans.values():
        assert int(plan.arrivals.abs().sum()) == 0
        plan.partials.fill_(torch.nan)
    assert torch.equal(kernel(x, weight, bias), first)
    close(first, linear.reference(x, weight, bias))


@pytest.mark.parametrize("tokens", [1, 2, 16, 17, 64, 65])
def test_any_number_of_tokens(tokens: int) -> None:
    """Whatever bucket a kernel was made for, and rows that lie apart, with NaN between them."""
    x, weight, bias = case(tokens, 40, 48)
    wide = torch.full((tokens, 100), torch.nan)
    wide[:, 20:68] = x
    expected = linear.reference(x, weight, bias)
    for made in (small_rows.make, linear_gemv.make, linear_fixed.make):
        close(made(context(bucket=0))(wide[:, 20:68], weight, bias), expected)


@pytest.mark.parametrize("dtype", ["f32", "f16"])
def test_a_row_has_its_bits_in_every_batch(dtype: str) -> None:
    """Rows keep their places in a tile here, for the interpreter's BLAS adds up according to place; a GPU does not."""
    x, weight, bias = case(150, 140, 104, dtype)
    whole = linear_fixed.make(context(dtype=dtype, bucket=3))(x, weight, bias)
    for first, last, bucket in ((0, 1, 0), (64, 75, 1), (128, 129, 0), (64, 128, 2), (64, 150, 3)):
        part = linear_fixed.make(context(dtype=dtype, bucket=bucket))(x[first:last], weight, bias)
        assert torch.equal(part, whole[first:last])


@pytest.mark.parametrize("outputs", [1, 8, 51, 64])
def test_results_of_cublas_start_on_16_bytes(outputs: int) -> None:
    where = context(dtype="f16", shape={"inputs": 72, "outputs": outputs, "bias": True})
    x, weight, bias = case(7, outputs, 72, "f16")
    for given in (bias, None):
        got = linear_cublas.make(where)(x, weight, given)
        close(got, linear.reference(x, weight, given), "f16")
        assert got.shape == (7, outputs)
        assert outputs == 1 or got.stride(0) % 8 == 0


@pytest.mark.parametrize("dtype", ["f32", "f16"])
def test_one_output(dtype: str) -> None:
    where = context(dtype=dtype, bucket=0, shape={"inputs": 72, "outputs": 1, "bias": True})
    x, weight, bias = case(1, 1, 72, dtype)
    close(linear_gemv.make(where)(x, weight, bias), linear.reference(x, weight, bias), dtype)


def test_equal_requests_share_buffers() -> None:
    cpu = torch.device("cpu")
    assert buffer(cpu, torch.float32, 64) is buffer(cpu, torch.float32, 64)
    assert not buffer(cpu, torch.int32, 64).any()


@pytest.mark.parametrize("capability", [80, 86, 90, 120])
@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("op", MODULES)
def test_every_configuration_fits_into_shared_memory(op: str, dtype: str, capability: int) -> None:
    limit = {80: 163, 86: 99, 90: 227, 120: 99}[capability] * 1024
    for bucket in range(3):
        where = context(op, dtype, bucket, device=replace(H200, capability=capability))
        configs = [small_rows.DEFAULT, *small_rows.candidates(where)]
        assert (5 if capability == 90 and dtype != "f32" else 2) <= len(configs) <= 25
        for config in configs:
            for padded in small_rows.PADDED:
                sizes = Sizes(4096, 4096)
                block_n, block_k, stages = small_rows.tile_of(where, config, sizes, padded)
                element = DTYPES[dtype].itemsize
                rows = (1 + (op != "linear")) * block_n
                tiles = (stages * (rows + padded) + rows * (config["early"] == "shared")) * block_k * element
                results = block_n * padded * 4 if config["per_processor"] else 0
                assert stages >= 1
                assert (tiles + results) * small_rows.resident(where, config, sizes) <= limit
