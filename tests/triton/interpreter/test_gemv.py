"""The kernel for one token over weights of 8 bits against the ops' references, in Triton's interpreter."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from llmcore.api.specs import DeviceInfo, OpContext
from llmcore.ops import DTYPES
from llmcore_devtools.kernels.compare import check
from llmcore_quantization.canonical import Scheme
from llmcore_quantization.ops import (
    linear_fp8_block,
    linear_w8a8,
    linear_w8a16,
    linear_w8a16_silu_and_mul,
    scheme_of,
    shape_of,
    sizes,
)
from llmcore_quantization.rounding import codes_of, quantized
from llmcore_triton.quantized import gemv
from llmcore_triton.quantized.gemv_kernel import FLOATS, INTEGERS

# exp overflows for gates far below zero, and means to
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::DeprecationWarning")

H200 = DeviceInfo("cuda", "NVIDIA H200", capability=90, processors=132)
ROWS, GROUPS, WORDS, GATED = "linear.w8a8", "linear.fp8_block", "linear.w8a16", "linear.w8a16_silu_and_mul"
MODULES: dict[str, Any] = {
    ROWS: linear_w8a8,
    GROUPS: linear_fp8_block,
    WORDS: linear_w8a16,
    GATED: linear_w8a16_silu_and_mul,
}
TYPES: dict[str, torch.dtype] = {"i8": torch.int8, "e4m3": torch.float8_e4m3fn}
FORMS = [(ROWS, "i8", 0), (ROWS, "e4m3", 0), (GROUPS, "e4m3", 128)]
FORMS += [(op, codes, group) for op in (WORDS, GATED) for codes in TYPES for group in (0, 128)]


def context(op: str, codes: str, group: int, inputs: int, outputs: int, dtype: str = "f16") -> OpContext:
    scheme = Scheme(codes=codes, group=group, scale="f32")  # type: ignore[arg-type]
    gated = op == GATED
    shape = shape_of(scheme, inputs, outputs * (1 + gated), True, "silu_and_mul" if gated else None)
    return OpContext(op=op, device=H200, dtype=dtype, bucket=0, shape=shape)  # type: ignore[arg-type]


def case(where: OpContext, tokens: int, spread: int = 1) -> tuple[Any, ...]:
    """Arguments, with NaN around x. `spread`: the outputs that share a scale."""
    generator = torch.Generator().manual_seed(tokens)
    shape, dtype = where.shape, DTYPES[where.dtype]
    inputs, rows = sizes(where)
    scheme = scheme_of(shape)
    held = quantized(torch.randn(rows, inputs, generator=generator) / 4, scheme, spread)
    bias = torch.randn(rows, generator=generator).to(dtype)
    x = torch.randn(tokens, inputs, generator=generator).to(dtype)
    if where.op in (ROWS, GROUPS):
        return *codes_of(x, TYPES[str(shape["codes"])], scheme.group), held["codes"], held["scale"], bias
    wide = torch.full((tokens + 2, inputs + 32), torch.nan, dtype=dtype)
    return wide[1:-1, 8 : 8 + inputs].copy_(x), held["codes"], held["scale"], None, None, bias


def agree(kernel: Any, where: OpContext, given: tuple[Any, ...], canonical: tuple[Any, ...]) -> None:
    module = MODULES[where.op]
    right = (module.make(where) if hasattr(module, "make") else module.reference)(*canonical)
    got = kernel(*given)
    assert got.dtype == DTYPES[where.dtype]
    allowed = {"f32": 1e-5, "f16": 4e-3}[where.dtype] * max(float(right.abs().max()), 1.0)
    torch.testing.assert_close(got, right, rtol=0.0, atol=allowed)
    assert torch.equal(kernel(*given), got)


@pytest.mark.parametrize("op", MODULES)
def test_samples(op: str) -> None:
    """The ops' own, whose rows are whole chunks."""
    shapes = [shape for shape in MODULES[op].SHAPES if shape["inputs"] % 16 == 0 and not shape["zeros"]]
    for shape in shapes:
        if shape["group"] % 128 == 0:
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


@pytest.mark.parametrize("op", [WORDS, GATED])
def test_packed_weights(op: str) -> None:
    where = context(op, "e4m3", 128, 256, 6)
    kernel, given = gemv.make(where), case(where, 1)
    agree(kernel, where, (given[0], *kernel.pack(*given[1:5]), given[5]), given)


def test_a_scale_for_all_tokens() -> None:
    """One that is repeated without memory of its own."""
    where = context(ROWS, "i8", 0, 64, 8)
    x, _, *others = case(where, 3)
    given = x, torch.full((1, 1), 0.01).expand(3, 1), *others
    agree(gemv.make(where), where, given, given)


def test_what_it_cannot_take() -> None:
    with pytest.raises(ValueError, match="multiple of 16"):
        gemv.make(context(ROWS, "i8", 0, 72, 8))
    with pytest.raises(ValueError, match="whole blocks"):
        gemv.make(context(WORDS, "i8", 64, 256, 8))


@pytest.mark.parametrize(("op", "codes", "group"), FORMS)
def test_configurations(op: str, codes: str, group: int) -> None:
    """A number of them that a tuning run has time for, with each thread's codes in 32 registers at most."""
    where = context(op, codes, group, 4096, 14336)
    configs = list(gemv.candidates(where))
    assert 8 <= len(configs) <= 20
    for config in configs:
        assert (1 + (op == GATED)) * config["block_n"] * config["block_k"] <= 128 * 32 * config["warps"]
        gemv.make_with(where, config)


def number(bits: int, kind: torch.dtype) -> float:
    """The number that has these bits."""
    whole = torch.tensor([bits]).to(torch.int32 if kind == torch.float32 else torch.int16)
    return float(whole.view(kind))


def run(ptx: str, quad: int) -> list[float]:
    """What the instructions of FLOATS and INTEGERS give for a quad."""
    held: dict[str, Any] = {"$4": quad}
    for line in ptx.strip("{ }").split(";"):
        what, _, rest = line.strip().partition(" ")
        if what == "mov.b32" and rest.startswith("{"):
            low, high, source = rest.replace("{", "").replace("}", "").split(", ")
            held[low], held[high] = held[source] & 0xFFFF, held[source] >> 16
        elif what and what != ".reg":
            target, *names = rest.split(", ")
            held[target] = _value(what, [held.get(name, name) for name in names])
    return [held[f"${i}"] for i in range(4)]


def _value(what: str, given: list[Any]) -> Any:
    """What an instruction gives for registers and constants."""
    a, b, c = (*given, None, None)[:3]
    if what == "mov.b32":
        return a
    if what == "xor.b32":
        return a ^ int(b, 0)
    if what == "prmt.b32":
        both, selector = a | int(b, 0) << 32, int(c, 0)
        return sum((both >> 8 * (selector >> 4 * i & 15) & 255) << 8 * i for i in range(4))
    if what == "sub.f32":
        return number(a, torch.float32) - number(int(b.replace("0f", "0x"), 0), torch.float32)
    if what == "cvt.rn.f16x2.e4m3x2":
        pair = torch.tensor([a & 255, a >> 8], dtype=torch.uint8).view(torch.float8_e4m3fn).half()
        low, high = (half & 0xFFFF for half in pair.view(torch.int16).tolist())
        return low | high << 16
    assert what == "cvt.f32.f16"
    return number(a, torch.float16)


@pytest.mark.parametrize(("ptx", "codes"), [(INTEGERS, "i8"), (FLOATS, "e4m3")])
def test_instructions_give_the_numbers_of_codes(ptx: str, codes: str) -> None:
    """All codes, in each place of a quad, by emulated PTX, which the interpreter does not run."""
    for code in range(256):
        quad = [(code + 77 * i) & 255 for i in range(4)]
        right = torch.tensor(quad, dtype=torch.uint8).view(TYPES[codes]).float()
        got = torch.tensor(run(ptx, sum(one << 8 * i for i, one in enumerate(quad))))
        torch.testing.assert_close(got, right, rtol=0.0, atol=0.0, equal_nan=True)
