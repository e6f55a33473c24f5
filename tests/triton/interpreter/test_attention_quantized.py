"""Attention over layouts that quantize, against the reference, which reads the same pool by the layout's `gather`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from operator import and_, rshift, xor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from llmcore.api.models import AttnSpec
from llmcore.api.protocols import AttnLimits
from llmcore.api.specs import DeviceInfo, OpContext
from llmcore.ops import attention, attn_gqa_decode, attn_gqa_mixed, attn_gqa_prefill
from llmcore_deepseek.ops import attn_mla
from llmcore_devtools import registry_of
from llmcore_devtools.kernels.attention_cases import Uploads, cases_of
from llmcore_devtools.kernels.attention_stored import over_its_layout, stored
from llmcore_devtools.kernels.compare import check
from llmcore_triton import quantized_kv
from llmcore_triton.attention import flashdecoding, gqa_attention, gqa_flashdecoding, prefill, unified
from llmcore_triton.attention.codes import half
from llmcore_triton.attention.grouped import Grouped
from llmcore_triton.attention.listed import Config
from llmcore_triton.mla import decode as mla_decode
from llmcore_triton.mla import unified as mla_unified
from llmcore_triton.specs.layouts import QUANTIZED

DEVICE = DeviceInfo("cuda", "NVIDIA H200", capability=90, processors=6)
SPLITTING = vars(Config(block_n=16, stages=3, least=16, per_processor=1))
TILES = {"block_m": 32, "block_n": 16, "warps": 4, "stages": 1, "pack": True, "tma": True, "small": False}
OPS = {"attn.gqa.decode": attn_gqa_decode, "attn.gqa.mixed": attn_gqa_mixed, "attn.gqa.prefill": attn_gqa_prefill}

DECODE = attention.rows([1, 1, 1, 0], [70, 16, 1, 0])
"""A row of several chunks, one of a whole block, one of a token, none."""
CHUNKS = attention.rows([1, 6, 20, 0], [50, 40, 20, 0])
"""A decode row, a chunk behind a prefix that ends inside a block, a whole prompt, none."""


def context(op: str, layout: str, dtype: str = "f16", granule: int = 1, **spec: Any) -> OpContext:
    sizes = {"heads": 4, "kv_heads": 2, "key_size": 32, "value_size": 32, "scale": 0.25, **spec}
    fixed = OpContext(op=op, device=DEVICE, dtype=dtype, layout=layout, granule=granule, bucket=2)
    return replace(fixed, shape=attention.shape_of(AttnSpec(**sizes)))


def held_to_gather(where: OpContext, kernel: Any, rows: attention.Sample) -> None:
    """Compare a kernel with the reference over rows of these lengths. Fixed scales differ by head and side."""

    def samples(_: OpContext) -> Iterator[attention.Sample]:
        yield rows

    module = OPS.get(where.op, attn_mla)
    op = SimpleNamespace(LAYOUTS=module.LAYOUTS, TOLERANCE=module.TOLERANCE, samples=samples)
    op.JOINED = getattr(module, "JOINED", False)
    over, where = over_its_layout(registry_of(), op, where)
    if over.layout.constants(0):
        scales = torch.linspace(0.003, 0.02, 2 * over.layout.group.kv_heads)
        over.layout.scales[0] = (scales[::2].clone(), scales[1::2].clone())
    assert check(over, kernel, where) == 1


DECODED: dict[str, tuple[str, Mapping[str, Any]]] = {
    "int8": ("token-int8", {"dtype": "bf16", "granule": 16}),
    "int8 in groups of 8 heads": ("token-int8", {"heads": 8, "kv_heads": 1, "window": 21}),
    "int8, exact": ("token-int8", {"dtype": "f32", "heads": 2}),
    "groups of int8": ("token-int8-g8", {"dtype": "bf16"}),
    "int8 from a least value": ("token-int8-min", {"dtype": "bf16", "soft_cap": 2.0}),
    "int8 from a least value, wider values": ("token-int8-min", {"dtype": "bf16", "value_size": 64}),
    "int8 from a least value, odd sizes": ("token-int8-min", {"key_size": 24, "value_size": 40, "granule": 16}),
    "int8 from a least value, exact": ("token-int8-min", {"dtype": "f32"}),
    "4 bits": ("token-int4", {"dtype": "bf16", "key_size": 64, "value_size": 64, "granule": 16}),
    "4 bits, values shorter than keys": ("token-int4", {"key_size": 64, "value_size": 32}),
    "4 bits, one group": ("token-int4-g64", {"dtype": "bf16", "key_size": 64, "value_size": 64}),
    "4 bits, odd sizes": ("token-int4-g8", {"dtype": "f32", "key_size": 40, "value_size": 24}),
    "keys of 8 bits, values of 4": ("token-int8-int4", {"dtype": "bf16", "key_size": 32, "value_size": 64}),
    "fp8": ("token-fp8", {"dtype": "bf16", "soft_cap": 2.0}),
    "fp8, narrow heads": ("token-fp8", {"key_size": 16, "value_size": 16}),
    "fp8, exact": ("token-fp8", {"dtype": "f32", "granule": 16}),
    "fp8, a scale per token": ("token-fp8-dynamic", {"heads": 3, "kv_heads": 3}),
}


@pytest.mark.parametrize("case", DECODED)
def test_decode(case: str) -> None:
    layout, given = DECODED[case]
    where = context("attn.gqa.decode", layout, **given)
    held_to_gather(where, gqa_flashdecoding.make_with(where, SPLITTING), DECODE)


@pytest.mark.parametrize(("bucket", "warps", "least"), [(0, 2, 64), (3, 2, 128), (4, 1, 128)])
def test_the_configuration_that_is_taken_unmeasured(bucket: int, warps: int, least: int) -> None:
    where = replace(context("attn.gqa.decode", "token-int8", "bf16"), bucket=bucket)
    kernel = gqa_flashdecoding.make(where)
    assert (kernel.config.warps, kernel.config.least, kernel.config.registers) == (warps, least, 128)
    held_to_gather(where, kernel, DECODE)


def test_without_f16_products_the_configuration_is_that_of_plain_kv() -> None:
    where = context("attn.gqa.decode", "token-int8", "bf16")
    plain = gqa_flashdecoding.make(replace(where, layout="token")).config
    assert gqa_flashdecoding.make(where).config != plain
    assert gqa_flashdecoding.make(replace(where, deterministic=True)).config == plain


def test_small_programs_are_timed_over_codes_alone() -> None:
    where = context("attn.gqa.decode", "token-int8", "bf16")
    for layout, small in (("token-int8", True), ("token", False)):
        found = gqa_flashdecoding.candidates(replace(where, layout=layout))
        assert any(config["warps"] == 1 for config in found) == small


def test_wide_heads_take_smaller_blocks() -> None:
    """Blocks of 128 tokens of heads of 256 elements would not fit into registers."""
    for op, module in (("attn.gqa.decode", gqa_flashdecoding), ("attn.gqa.mixed", unified)):
        where = replace(context(op, "token-int4", "bf16", key_size=128, value_size=128), bucket=4)
        wide = context(op, "token-int4", "bf16", key_size=256, value_size=128)
        assert module.make(where).config.block_n == 128
        assert module.make(replace(wide, bucket=4)).config.block_n == 64


def test_the_tile_of_mixed_steps() -> None:
    where = context("attn.gqa.mixed", "token-int8", "bf16", 16, key_size=32, value_size=32)
    kernel = unified.make(where)
    assert kernel.config.block_m == 16
    held_to_gather(where, kernel, CHUNKS)
    assert unified.make(replace(where, deterministic=True)).config.block_m == 64
    assert unified.make(replace(where, layout="token")).config.block_m == 64


@pytest.mark.parametrize("size", [1e-6, 3e4])
def test_f16_products_hold_what_bf16_holds(size: float) -> None:
    """Queries and values of a bf16 model that f16 could not hold."""
    where = context("attn.gqa.decode", "token-int8", "bf16", scale=0.25 / size)
    [plain] = next(cases_of(attn_gqa_decode, replace(where, layout="token"), [DECODE]))
    plain.q.mul_(size)
    plain.kv[1].mul_(size / 10)
    tried, _ = over_its_layout(registry_of(), attn_gqa_decode, where)
    given = stored(plain, tried.layout)
    kernel = gqa_flashdecoding.make_with(where, SPLITTING)
    kernel.workspace(AttnLimits(rows=4, tokens=4, kv_len=80))
    meta = dict(given.meta)
    kernel.plan(given.rows, Uploads(meta))
    got = kernel.run(given.q, given.k_new, given.v_new, given.kv, meta, given.out())
    torch.testing.assert_close(got.float(), given.expected()[0], rtol=0.02, atol=0.002 * size)


@pytest.mark.parametrize(("module", "dtype"), [(flashdecoding, "f16"), (gqa_attention, "bf16")])
@pytest.mark.parametrize("layout", ["token-int8", "token-int4-g16", "token-fp8"])
def test_other_kernels_of_decode(layout: str, module: Any, dtype: str) -> None:
    where = context("attn.gqa.decode", layout, dtype, key_size=32, value_size=32)
    held_to_gather(where, module.make_with(where, SPLITTING), DECODE)


@pytest.mark.parametrize(
    ("layout", "dtype", "deterministic"),
    [
        ("token-int8", "bf16", False),
        ("token-int8", "f16", True),
        ("token-int8-min", "f16", False),
        ("token-int4-g16", "f16", True),
        ("token-int4-g16", "bf16", False),
        ("token-fp8", "bf16", False),
    ],
)
def test_mixed(layout: str, dtype: str, deterministic: bool) -> None:
    where = context("attn.gqa.mixed", layout, dtype, 16, key_size=32, value_size=32)
    where = replace(where, deterministic=deterministic)
    fixed = 32 if deterministic else None
    held_to_gather(where, Grouped(where, Config(**SPLITTING), decode=False, fixed=fixed), CHUNKS)


@pytest.mark.parametrize(
    ("layout", "dtype"),
    [("token-int8", "f16"), ("token-int4-g16", "f32"), ("token-int8-min", "f16"), ("token-fp8", "f16")],
)
def test_prefill_behind_a_prefix(layout: str, dtype: str) -> None:
    where = context("attn.gqa.prefill", layout, dtype, 16, key_size=32, value_size=32)
    held_to_gather(where, prefill.make_with(where, TILES), CHUNKS)


@pytest.mark.parametrize("op", ["attn.mla.decode", "attn.mla.mixed"])
@pytest.mark.parametrize(("dtype", "latent"), [("f32", 32), ("f16", 256)])
def test_latents(op: str, dtype: str, latent: int) -> None:
    sizes = {"heads": 6, "kv_heads": 1, "key_size": latent + 16, "value_size": latent, "scale": 0.1}
    where = context(op, "mla-latent-fp8", dtype, 16, **sizes)
    module = mla_decode if op == "attn.mla.decode" else mla_unified
    rows = DECODE if op == "attn.mla.decode" else CHUNKS
    held_to_gather(where, module.make_with(where, {**SPLITTING, "block_m": 16}), rows)


def ran(ptx: str, word: int, outputs: int) -> list[float]:
    """The f16 numbers in the registers $0, $1 ... after the instructions of `ptx`, with `word` in the next one."""
    registers = {f"${outputs}": word}

    def value(name: str) -> int:
        return registers[name] if name in registers else int(name, 0)

    def halves(number: int) -> np.ndarray[Any, np.dtype[np.float16]]:
        return np.array([number], np.uint32).view(np.float16)

    def picked(a: int, b: int, selector: int) -> int:
        every = np.array([a, b], np.uint32).view(np.uint8)
        return int(every[[selector >> shift & 15 for shift in (0, 4, 8, 12)]].view(np.uint32)[0])

    does: dict[str, Callable[..., int]] = {
        "mov.b32": int,
        "xor.b32": xor,
        "and.b32": and_,
        "shr.b32": rshift,
        "prmt.b32": picked,
        "sub.f16x2": lambda a, b: int((halves(a) - halves(b)).view(np.uint32)[0]),
        "cvt.rn.f16x2.e4m3x2": lambda a: int(
            torch.tensor([a & 255, a >> 8], dtype=torch.uint8)
            .view(torch.float8_e4m3fn)
            .half()
            .numpy()
            .view(np.uint32)[0]
        ),
    }
    for line in ptx.strip("{} \n").split(";")[:-1]:
        name, _, rest = line.strip().partition(" ")
        target, *sources = (part.strip(" {}") for part in rest.split(","))
        if rest.startswith("{"):
            # the halves of a register
            registers[target], registers[sources[0]] = value(sources[1]) & 0xFFFF, value(sources[1]) >> 16
        elif name != ".reg":
            registers[target] = does[name](*map(value, sources))
    return np.concatenate([halves(registers[f"${index}"]) for index in range(outputs)]).tolist()


@pytest.mark.parametrize("first", range(0, 256, 4))
def test_instructions_that_make_f16_of_codes(first: int) -> None:
    """A GPU runs them; the interpreter does not."""
    codes = np.arange(first, first + 4, dtype=np.uint8)
    word = int(codes.view(np.uint32)[0])
    for name, numbers in (("i8", codes.view(np.int8)), ("u8", codes)):
        raised = (numbers.astype(int) + quantized_kv.offset(name)).tolist()
        assert ran(quantized_kv._of_four(name), word, 2) == raised
        assert ran(quantized_kv._of_two(name, 0), word, 1) == raised[::2]
        assert ran(quantized_kv._of_two(name, 1), word, 1) == raised[1::2]
    fp8 = torch.from_numpy(codes).view(torch.float8_e4m3fn).float().nan_to_num(0.0).tolist()
    assert np.nan_to_num(ran(quantized_kv._of_four("e4m3"), word, 2), nan=0.0).tolist() == fp8
    assert np.nan_to_num(ran(quantized_kv._of_two("e4m3", 0), word, 1), nan=0.0).tolist() == fp8[::2]
    assert np.nan_to_num(ran(quantized_kv._of_two("e4m3", 1), word, 1), nan=0.0).tolist() == fp8[1::2]
    assert ran(quantized_kv._FROM_U4.value, word, 4) == [*(codes & 15).tolist(), *(codes >> 4).tolist()]


def test_where_products_are_of_f16() -> None:
    for layout in ("token", *QUANTIZED):
        where = context("attn.gqa.decode", layout, "bf16", key_size=64, value_size=64)
        assert half(where) == (layout != "token")
        assert not half(replace(where, deterministic=True))
        assert not half(replace(where, dtype="f32"))
    assert not half(context("attn.gqa.decode", "token-int8", "bf16", key_size=24))
    assert not half(context("attn.gqa.decode", "token-int8", "bf16", key_size=16)), "8 pairs are too few rows"
