"""The kernels for weights in 4 and 8 bits against their ops' references, in Triton's interpreter."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from llmcore.api.specs import DeviceInfo, OpContext
from llmcore_devtools.kernels.compare import check
from llmcore_quantization.canonical import Scheme
from llmcore_quantization.ops import (
    linear_w4a16,
    linear_w4a16_silu_and_mul,
    linear_w8a16,
    linear_w8a16_silu_and_mul,
    shape_of,
)
from llmcore_quantization.rounding import quantized
from llmcore_triton.quantized import packing, scratch, weight_only
from llmcore_triton.quantized.codes import numbers_asm

# exp overflows for gates far below zero, and means to
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::DeprecationWarning")

H200 = DeviceInfo("cuda", "NVIDIA H200", capability=90, processors=132)
OPS: dict[str, Any] = {
    "linear.w4a16": linear_w4a16,
    "linear.w8a16": linear_w8a16,
    "linear.w4a16_silu_and_mul": linear_w4a16_silu_and_mul,
    "linear.w8a16_silu_and_mul": linear_w8a16_silu_and_mul,
}
CASES = [(op, index) for op, module in OPS.items() for index in range(len(module.SHAPES))]


def context(op: str, shape: Any, dtype: str = "f16", bucket: int = 1, processors: int = 3) -> OpContext:
    return OpContext(op=op, device=replace(H200, processors=processors), dtype=dtype, bucket=bucket, shape=shape)  # type: ignore[arg-type]


@pytest.mark.parametrize(("op", "index"), CASES)
def test_samples(op: str, index: int) -> None:
    where = context(op, OPS[op].SHAPES[index], "f32" if index == 1 else "f16", 1 + index % 2)
    assert check(OPS[op], weight_only.make_with(where, {"block_n": 16}), where) > 0


@pytest.mark.parametrize(("op", "index"), CASES)
def test_samples_through_a_scratch_buffer(op: str, index: int) -> None:
    where = context(op, OPS[op].SHAPES[index], "f16", 3)
    assert check(OPS[op], scratch.make_with(where, {"block_n": 16}), where) > 0


SHARED = {"block_n": 16, "per_processor": 1, "stages": 2}
"""So many programs that they share tiles."""

FORMS = {
    "u4": Scheme(codes="u4", group=64, zeros=True),
    "u4 without zeros": Scheme(codes="u4", group=128, scale="bf16"),
    "i8": Scheme(codes="i8", scale="f32"),
    "e4m3": Scheme(codes="e4m3", group=128, scale="f32"),
    "groups that end within blocks": Scheme(codes="u4", group=96, zeros=True),
}


def case(
    scheme: Scheme, gated: bool, tokens: int, outputs: int, inputs: int
) -> tuple[OpContext, Any, tuple[Any, ...]]:
    """The context, the op's module, and the arguments."""
    op = ("linear.w4a16" if scheme.codes == "u4" else "linear.w8a16") + ("_silu_and_mul" if gated else "")
    generator = torch.Generator().manual_seed(tokens)
    rows = outputs * (1 + gated)
    held = quantized(torch.randn(rows, inputs, generator=generator) / 4, scheme, 1)
    x = torch.randn(tokens, inputs, generator=generator).half()
    shape = shape_of(scheme, inputs, rows, True, "silu_and_mul" if gated else None)
    bias = torch.randn(rows, generator=generator).half()
    return context(op, shape), OPS[op], (x, held["codes"], held["scale"], held.get("zero"), None, bias)


def close(got: torch.Tensor, module: Any, arguments: tuple[Any, ...]) -> None:
    expected = module.reference(*arguments)
    allowed = module.TOLERANCE["f16"] * max(float(expected.abs().max()), 1.0)
    torch.testing.assert_close(got, expected, rtol=0.0, atol=allowed)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("processors", "config"),
    [
        (5, {}),
        (7, {"tma": True, "scaled": "weights"}),
        (5, {"tokens": 16, "group": 2, "block_w": 32}),
        (1, {"per_processor": 0, "tokens": 32, "tma": True, "scaled": "weights", "block_w": 32}),
    ],
)
def test_programs_that_share_tiles(form: str, processors: int, config: dict[str, Any]) -> None:
    """Tiles that begin in one program and end in another, several tiles of tokens, and x with NaN around it."""
    odd = form == "groups that end within blocks"
    for gated, tokens, outputs, inputs in ((False, 33, 24, 384 if odd else 512), (True, 3, 16, 288 if odd else 256)):
        where, module, (x, *rest) = case(FORMS[form], gated, tokens, outputs, inputs)
        where = replace(where, device=replace(H200, processors=processors))
        kernel = weight_only.make_with(where, {**SHARED, **config})
        wide = torch.full((tokens + 2, inputs + 32), torch.nan, dtype=torch.float16)
        rows = wide[1:-1, 8 : 8 + inputs].copy_(x)
        close(kernel(rows, *kernel.pack(*rest[:4]), rest[4]), module, (x, *rest))
        assert all(not plan.arrivals.any() for plan in kernel._plans.values())


@pytest.mark.parametrize("counts", [(20, 40), (40, 20)])
def test_steps_of_one_op_may_have_other_tiles(counts: tuple[int, int]) -> None:
    """Where shared memory is small, 40 tokens have shorter blocks of weights by TMA than 20."""
    where, module, (x, *rest) = case(FORMS["u4"], False, 40, 128, 512)
    kernel = weight_only.make(replace(where, bucket=2, device=replace(H200, capability=120)))
    weights = kernel.pack(*rest[:4])
    for count in counts:
        close(kernel(x[:count], *weights, rest[4]), module, (x[:count], *rest))
    boxes = [kernel._plan(count).boxes for count in counts]
    assert None not in boxes and boxes[0][1] != boxes[1][1]  # type: ignore[index]


def test_a_part_of_each_word_of_a_block() -> None:
    where = context("linear.w4a16", shape_of(Scheme(codes="u4", group=128), 512, 1, False))
    form = packing.Packing(where)
    codes = torch.arange(512, dtype=torch.uint8).remainder(16)[None]
    words, scale, zero, order = form.pack(
        torch.bitwise_or(codes[:, 0::2], codes[:, 1::2] << 4), torch.ones(1, 4), None, None
    )
    assert form.blocks == packing.Blocks(256, 4, 64, 2) and (zero, order) == (None, None)
    for part in range(4):
        assert torch.equal((words.view(2, 64) >> 4 * part) & 15, codes.view(2, 4, 64)[:, part].short())
    assert scale.shape == (4, 1)


@pytest.mark.parametrize(("codes", "group", "inputs", "words"), [("u4", 32, 4096, 32), ("i8", 0, 4096, 64)])
def test_a_scale_serves_whole_parts(codes: str, group: int, inputs: int, words: int) -> None:
    blocks = packing.blocks_of({"codes": codes, "group": group, "inputs": inputs})
    assert blocks is not None and blocks.words == words
    assert packing.blocks_of({"codes": codes, "group": 8, "inputs": inputs}) is None


def test_equal_forms_have_equal_names() -> None:
    scheme = Scheme(codes="u4", group=128, zeros=True)
    shapes = [shape_of(scheme, 4096, 64, False), shape_of(scheme, 14336, 32, True)]
    names = {packing.Packing(context("linear.w4a16", shape, "bf16")).name for shape in shapes}
    assert len(names) == 1
    assert packing.Packing(context("linear.w4a16", shapes[0], "f16")).name not in names


def test_scales_in_f32_have_no_room_for_zeros() -> None:
    with pytest.raises(ValueError, match="beside zeros"):
        packing.marks(torch.ones(2, 3), torch.zeros(2, 3, dtype=torch.uint8), "bf16")


@pytest.mark.parametrize("op", OPS)
def test_every_configuration_fits_into_shared_memory(op: str) -> None:
    codes = "u4" if "w4" in op else "i8"
    gated = "silu_and_mul" if op.endswith("mul") else None
    scheme = Scheme(codes=codes, group=128 if codes == "u4" else 0, zeros=codes == "u4")  # type: ignore[arg-type]
    for bucket in range(5):
        where = context(op, shape_of(scheme, 4096, 28672, False, gated), "bf16", bucket, 132)
        configs = list(weight_only.candidates(where))
        assert 3 <= len(configs) <= 8
        form = packing.Packing(where)
        for config in ({**weight_only.default(where), **config} for config in configs):
            for padded in (count for count in weight_only.PADDED if count <= config["tokens"]):
                block_n, block_w, stages = weight_only.tile_of(where, config, padded)
                rows = (1 + (gated is not None)) * block_n
                marks = rows * 4 * form.blocks.parts // form.alike if form.group else 0
                words, inputs = rows * block_w * 2 + marks, padded * form.blocks.parts * block_w * 2
                results = 4 * padded * (64 if config["warps"] == 4 and padded >= 64 else block_n)
                shared = stages * (words + inputs) - words + bool(config["per_processor"]) * results
                resident = config["per_processor"] or max(8 // config["warps"], 1)
                assert stages >= 1 and (shared + 2 * 1024) * resident <= 228 * 1024


def run(ptx: str, words: torch.Tensor, zero: torch.Tensor, half: torch.dtype) -> torch.Tensor:
    """What the instructions of codes.numbers_asm give for `words` int16, each in both halves of a register."""

    at = {"$1": words[:, None].int() & 0xFFFF, "$2": zero[:, None].int() & 0xFFFF}
    whole = {name: (value | value << 16).long() & 0xFFFFFFFF for name, value in at.items()}
    for line in ptx.strip("{ }").split(";"):
        what, _, rest = line.strip().partition(" ")
        if not what or what == ".reg":
            continue
        target, *names = (name.strip() for name in rest.split(","))
        a, *others = (whole[name] if name in whole else torch.tensor(int(name)) for name in names)
        if what == "mov.b32":
            value = a
        elif what in ("shl.b32", "shr.b32"):
            value = a << others[0] if what == "shl.b32" else a >> others[0]
        elif what == "and.b32":
            value = a & others[0]
        elif what == "lop3.b32":
            value = {0xEA: (a & others[0]) | others[1], 0x6A: (a & others[0]) ^ others[1]}[int(others[2])]
        else:
            assert what == ("fma.rn.bf16x2" if half == torch.bfloat16 else "fma.rn.f16x2")
            parts = []
            for shift in (0, 16):
                x, y, z = (((t >> shift) & 0xFFFF).to(torch.int16).view(half).double() for t in (a, *others))
                parts.append((x * y + z).to(half).view(torch.int16).long() & 0xFFFF)
            value = parts[0] | parts[1] << 16
        whole[target] = (value & 0xFFFFFFFF).expand(len(words), 1)
    found = whole["$0"]
    assert torch.equal(found >> 16, found & 0xFFFF)
    return (found[:, 0] & 0xFFFF).to(torch.int16).view(half)


@pytest.mark.parametrize("kind", ["bf16", "fp16"])
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("codes", ["u4", "i8", "e4m3"])
def test_instructions_give_the_numbers_of_codes(codes: str, zeros: bool, kind: str) -> None:
    """All words, each part of them, by emulated PTX, which the interpreter does not run."""
    words = torch.arange(-(2**15), 2**15).to(torch.int16)
    half = torch.bfloat16 if kind == "bf16" else torch.float16
    held = torch.tensor([5 if codes == "u4" else -77], dtype=torch.uint8 if codes == "u4" else torch.int8)
    bits = packing.zero_bits(held, "bf16" if kind == "bf16" else "f16").expand(len(words))
    bits_of, parts = (4, 4) if codes == "u4" else (8, 2)
    for part in range(parts):
        code = ((words.int() & 0xFFFF) >> bits_of * part & (1 << bits_of) - 1).to(torch.uint8)
        stored = {"u4": torch.uint8, "i8": torch.int8, "e4m3": torch.float8_e4m3fn}[codes]
        exact = code.view(stored).float()
        exact -= float(held) if zeros else 8.0 if codes == "u4" else 0.0
        known = ~exact.isnan()
        got = run(numbers_asm(codes, part, kind, zeros), words, bits, half).float()
        assert torch.equal(got[known], exact.to(half).float()[known])
