"""The kernel for one token over codes of 8 bits against the ops' references, in Triton's interpreter."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from llmcore.api.specs import DeviceInfo, OpContext
from llmcore.ops import DTYPES
from llmcore_devtools.kernels.compare import check
from llmcore_quantization.canonical import Scheme
from llmcore_quantization.ops import linear_fp8_block, linear_w8a8, scheme_of, shape_of, sizes
from llmcore_quantization.rounding import codes_of, quantized
from llmcore_triton.quantized import gemv
from llmcore_triton.quantized.gemv_kernel import FLOATS

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

H200 = DeviceInfo("cuda", "NVIDIA H200", capability=90, processors=132)
ROWS, GROUPS = "linear.w8a8", "linear.fp8_block"
MODULES: dict[str, Any] = {ROWS: linear_w8a8, GROUPS: linear_fp8_block}
TYPES: dict[str, torch.dtype] = {"i8": torch.int8, "e4m3": torch.float8_e4m3fn}
FORMS = [(ROWS, "i8", 0), (ROWS, "e4m3", 0), (GROUPS, "e4m3", 128)]


def context(op: str, codes: str, group: int, inputs: int, outputs: int, dtype: str = "f16") -> OpContext:
    scheme = Scheme(codes=codes, group=group, scale="f32")  # type: ignore[arg-type]
    shape = shape_of(scheme, inputs, outputs, True)
    return OpContext(op=op, device=H200, dtype=dtype, bucket=0, shape=shape)  # type: ignore[arg-type]


def case(where: OpContext, tokens: int, spread: int = 1) -> tuple[Any, ...]:
    """Arguments. `spread`: the outputs that share a scale."""
    generator = torch.Generator().manual_seed(tokens)
    shape, dtype = where.shape, DTYPES[where.dtype]
    inputs, rows = sizes(where)
    scheme = scheme_of(shape)
    held = quantized(torch.randn(rows, inputs, generator=generator) / 4, scheme, spread)
    bias = torch.randn(rows, generator=generator).to(dtype)
    x = torch.randn(tokens, inputs, generator=generator).to(dtype)
    return *codes_of(x, TYPES[str(shape["codes"])], scheme.group), held["codes"], held["scale"], bias


def agree(kernel: Any, where: OpContext, given: tuple[Any, ...], canonical: tuple[Any, ...]) -> None:
    right = MODULES[where.op].make(where)(*canonical)
    got = kernel(*given)
    assert got.dtype == DTYPES[where.dtype]
    allowed = {"f32": 1e-5, "f16": 4e-3}[where.dtype] * max(float(right.abs().max()), 1.0)
    torch.testing.assert_close(got, right, rtol=0.0, atol=allowed)
    assert torch.equal(kernel(*given), got)


@pytest.mark.parametrize("op", MODULES)
def test_samples(op: str) -> None:
    """The ops' own, whose rows are whole chunks."""
    for shape in MODULES[op].SHAPES:
        if shape["inputs"] % 16 == 0:
            where = replace(context(op, "i8", 0, 16, 1), shape=shape)
            assert check(MODULES[op], gemv.make(where), where) > 0


@pytest.mark.parametrize(("op", "codes", "group"), FORMS)
@pytest.mark.parametrize("config", [{"block_n": 4, "block_k": 128}, {"block_n": 2, "block_k": 512}])
def test_blocks_that_reach_over_the_ends(op: str, codes: str, group: int, config: dict[str, int]) -> None:
    """Several steps, and one; rows that end within a block; one token, and more of them."""
    for inputs, outputs, tokens in ((384, 6, 1), (256, 3, 2), (208, 5, 1)):
        if inputs % 128 == 0 or not group:
            where = context(op, codes, group, inputs, outputs)
            kernel = gemv.make_with(where, config)
            given = case(where, tokens)
            agree(kernel, where, given, given)
            without = *given[:-1], None
            agree(kernel, where, without, without)


@pytest.mark.parametrize("codes", TYPES)
def test_results_in_f32(codes: str) -> None:
    where = context(ROWS, codes, 0, 144, 9, "f32")
    agree(gemv.make(where), where, case(where, 1), case(where, 1))


def test_scales_of_blocks() -> None:
    where = context(GROUPS, "e4m3", 128, 384, 256)
    kernel, given = gemv.make_with(where, {"block_k": 256}), case(where, 1, spread=128)
    x, x_scale, codes, scale, bias = given
    packed = kernel.pack(codes, scale)  # type: ignore[call-arg]
    assert kernel.packing == "blocks" and packed[1].shape == (2, 3)
    agree(kernel, where, (x, x_scale, *packed, bias), given)


def test_a_scale_for_all_tokens() -> None:
    """One that is repeated without memory of its own."""
    where = context(ROWS, "i8", 0, 64, 8)
    x, _, *others = case(where, 3)
    given = x, torch.full((1, 1), 0.01).expand(3, 1), *others
    agree(gemv.make(where), where, given, given)


def test_what_it_cannot_take() -> None:
    with pytest.raises(ValueError, match="multiple of 16"):
        gemv.make(context(ROWS, "i8", 0, 72, 8))


@pytest.mark.parametrize(("op", "codes", "group"), FORMS)
def test_configurations(op: str, codes: str, group: int) -> None:
    """A number of them that a tuning run has time for, with each thread's codes in 32 registers at most."""
    where = context(op, codes, group, 4096, 14336)
    configs = list(gemv.candidates(where))
    assert 8 <= len(configs) <= 20
    for config in configs:
        assert config["block_n"] * config["block_k"] <= 128 * 32 * config["warps"]
        gemv.make_with(where, config)


def run(quad: int) -> list[float]:
    """What the instructions of FLOATS give for a quad."""
    held: dict[str, Any] = {"$4": quad}
    for line in FLOATS.strip("{ }").split(";"):
        what, _, rest = line.strip().partition(" ")
        names = rest.replace("{", "").replace("}", "").split(", ")
        if what == "mov.b32":
            low, high, source = names
            held[low], held[high] = held[source] & 0xFFFF, held[source] >> 16
        elif what == "cvt.rn.f16x2.e4m3x2":
            held[names[0]] = int(torch.tensor([held[names[1]]]).short().view(TYPES["e4m3"]).half().view(torch.int32))
        elif what == "cvt.f32.f16":
            held[names[0]] = float(torch.tensor([held[names[1]]]).short().view(torch.half))
        else:
            assert what in ("", ".reg")
    return [held[f"${i}"] for i in range(4)]


def test_instructions_give_the_numbers_of_codes() -> None:
    """All codes, in each place of a quad, by emulated PTX, which the interpreter does not run."""
    for code in range(256):
        quad = [(code + 77 * i) & 255 for i in range(4)]
        right = torch.tensor(quad, dtype=torch.uint8).view(TYPES["e4m3"]).float()
        got = torch.tensor(run(sum(one << 8 * i for i, one in enumerate(quad))))
        torch.testing.assert_close(got, right, rtol=0.0, atol=0.0, equal_nan=True)
