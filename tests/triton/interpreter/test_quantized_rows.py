"""The kernels that write quantized rows, in Triton's interpreter: their ops' samples, views, what is not finite."""

from __future__ import annotations

import importlib
from dataclasses import replace
from typing import Any

import pytest
import torch
import triton.language as tl
from llmcore.api import DeviceInfo, OpContext
from llmcore.ops import DTYPES
from llmcore_devtools.kernels.compare import check
from llmcore_devtools.kernels.real_shapes import real_shapes
from llmcore_quantization.canonical import shapes
from llmcore_quantization.ops import outputs_of, scheme_of
from llmcore_triton.specs.quantized import row_kernels
from llmcore_triton.specs.rows import LONGEST
from triton.runtime import interpreter

H200 = DeviceInfo("cuda", "NVIDIA H200", capability=90, processors=132)
SPECS = {spec.op: spec for spec in row_kernels()}
FORMS = [(codes, group) for codes in ("i8", "e4m3") for group in (0, 128)]


@pytest.fixture(autouse=True)
def casts_to_float8(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter's own cast rounds some f32 to a wrong float8. torch's is the GPU's."""
    own = interpreter._convert_float

    def convert(data: Any, kind: Any, into: Any, rounding: Any) -> Any:
        if kind != tl.float32 or into != tl.float8e4nv:
            return own(data, kind, into, rounding)
        return torch.from_numpy(data.copy()).to(torch.float8_e4m3fn).view(torch.uint8).numpy()

    monkeypatch.setattr(interpreter, "_convert_float", convert)


def context(op: str, dtype: str = "f32", bucket: int = 1, **shape: Any) -> OpContext:
    return OpContext(op=op, device=H200, dtype=dtype, bucket=bucket, shape=shape)  # type: ignore[arg-type]


def made(where: OpContext) -> Any:
    return importlib.import_module(f"llmcore_triton.quantized.{where.op}").make(where)


def module(op: str) -> Any:
    return importlib.import_module(f"llmcore_quantization.ops.{op}")


def numbers(*shape: int, dtype: str = "f32", seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DTYPES[dtype])


@pytest.mark.parametrize("dtype", ["f32", "f16"])
@pytest.mark.parametrize("op", SPECS)
def test_samples(op: str, dtype: str) -> None:
    all_shapes = [*module(op).SHAPES, *({"size": 1152, "codes": codes, "group": group} for codes, group in FORMS[1:3])]
    for shape in all_shapes:
        few = shape is all_shapes[0] or shape is all_shapes[-3]
        where = context(op, dtype, int(few), **{"static": False, **shape} if op == "quantize_rows" else shape)
        assert SPECS[op].refuses(where) is None  # type: ignore[misc]
        assert check(module(op), made(where), where) > 0


@pytest.mark.parametrize("op", SPECS)
def test_every_launch_configuration(op: str) -> None:
    kernel = importlib.import_module(f"llmcore_triton.quantized.{op}")
    for codes, group in (("i8", 128), ("e4m3", 0)):
        where = context(op, bucket=0, size=640, codes=codes, group=group, static=False)
        configs = list(kernel.candidates(where))
        assert configs and kernel.default(where) in configs
        for config in configs:
            assert check(module(op), kernel.make_with(where, config), where) > 0


@pytest.mark.parametrize("op", ["quantize_rows", "silu_and_mul_quant"])
def test_a_block_has_whole_groups(op: str) -> None:
    where = context(op, size=4096, codes="i8", group=2048, static=False)
    assert SPECS[op].refuses(where) is None  # type: ignore[misc]
    assert check(module(op), made(where), where) > 0


def test_wide_rows_that_share_a_multiprocessor() -> None:
    kernel = importlib.import_module("llmcore_triton.quantized.quantize_rows")
    where = context("quantize_rows", "f16", 4, size=9000, codes="i8", group=0, static=False)
    (config, *_) = [config for config in kernel.candidates(where) if "maxnreg" in config]
    x = numbers(2, 9000, dtype="f16")
    same(kernel.make_with(where, config)(x, None), module("quantize_rows").make(where)(x, None))


@pytest.mark.parametrize(("codes", "group"), FORMS)
def test_rows_within_wider_ones(codes: str, group: int) -> None:
    """A projection's part, and a residual that is changed in place."""
    wide = torch.full((5, 1000), torch.nan, dtype=torch.float16)
    wide[:, 100:612] = numbers(5, 512, dtype="f16")
    for op, size in (("quantize_rows", 512), ("silu_and_mul_quant", 256)):
        where = context(op, "f16", size=size, codes=codes, group=group, static=False)
        rest = (None,) if op == "quantize_rows" else ()
        same(made(where)(wide[:, 100:612], *rest), module(op).make(where)(wide[:, 100:612], *rest))
    where = context("add_rms_norm_quant", "f16", size=512, codes=codes, group=group)
    residual, weight, x = numbers(5, 512, dtype="f16", seed=1), numbers(512, dtype="f16", seed=2), wide[:, 100:612]
    expected = module(where.op).make(where)(x, residual.clone(), weight, 1e-5)
    got = made(where)(x, residual, weight, 1e-5)
    assert got[2].data_ptr() == residual.data_ptr() and torch.equal(got[2], expected[2])
    same(got[:2], expected[:2], norm=True)


def same(got: Any, expected: Any, norm: bool = False) -> None:
    """A norm rounds a few values otherwise than its reference."""
    torch.testing.assert_close(got[1], expected[1], rtol=2e-3 if norm else 0.0, atol=0.0)
    assert (got[0].float() != expected[0].float()).float().mean() <= (0.02 if norm else 0.0)


@pytest.mark.parametrize(("codes", "group"), FORMS)
def test_a_row_that_is_not_finite_stays_so_and_is_the_only_one(codes: str, group: int) -> None:
    x = numbers(4, 256)
    x[1, 7], x[2, 200] = torch.nan, torch.inf
    where = context("quantize_rows", size=256, codes=codes, group=group, static=False)
    _, scales = made(where)(x, None)
    groups = x.view(4, -1, group or 256)
    assert torch.equal(scales.isfinite(), groups.isfinite().all(-1)) and not scales.isinf().any()


@pytest.mark.parametrize("codes", ["i8", "e4m3"])
def test_halves_round_as_in_a_division_and_a_fixed_scale_clips(codes: str) -> None:
    where = context("quantize_rows", size=512, codes=codes, group=0, static=True)
    x, scale = (torch.arange(-256.0, 256.0) / 8).repeat(2, 1), torch.full((1,), 0.25)
    got, expected = made(where)(x, scale), module("quantize_rows").make(where)(x, scale)
    same(got, expected)
    far = made(where)(x * 1e6, scale)[0].float()
    assert set(far.unique().tolist()) == ({-128, 0, 127} if codes == "i8" else {-448, 0, 448})


def test_shapes_of_common_models_fit() -> None:
    for op, spec in SPECS.items():
        assert real_shapes(op) and all(spec.refuses(context(op, **shape)) is None for shape in real_shapes(op))  # type: ignore[misc]
    for op in ("linear.w4a16", "linear.w8a16_silu_and_mul", "linear.w8a8", "linear.fp8_block"):
        assert len(real_shapes(op)) > 4
        for shape in real_shapes(op):
            assert shapes(scheme_of(shape), int(shape["inputs"]), outputs_of(shape))


def test_kernels_say_what_they_need() -> None:
    def refuses(op: str, **more: Any) -> str:
        where = context(op, **{"size": 256, "codes": "i8", "group": 0, **more})
        return str(SPECS[op].refuses(where))  # type: ignore[misc]

    assert "needs to know" in refuses("quantize_rows", size=None)
    assert f"not {LONGEST + 1}" in refuses("silu_and_mul_quant", size=LONGEST + 1)
    assert f"not {2 * LONGEST}" in refuses("rms_norm_quant", size=2 * LONGEST, group=128)
    assert refuses("quantize_rows", size=2 * LONGEST, group=128) == "None"
    assert "power of two" in refuses("quantize_rows", size=288, group=96)
    old = replace(context("quantize_rows", size=256, codes="e4m3", group=0), device=replace(H200, capability=80))
    assert "converts fp8" in str(SPECS["quantize_rows"].refuses(old))  # type: ignore[misc]
