"""linear.w4a16=direct and its relatives: when it is chosen, how it is bound, and what a Hopper's compiler makes of it.

Gluon does not run in Triton's interpreter, so results are checked on GPUs: `llmcore kernels linear.w4a16 --check`.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from compiled_for_hopper import compiling, instructions
from llmcore.api.specs import DeviceInfo, OpContext
from llmcore.config import Config
from llmcore.registry.loader import build_registry, select
from llmcore.registry.resolve import candidates_for, resolve
from llmcore_quantization.canonical import Scheme
from llmcore_quantization.ops import shape_of
from llmcore_triton.quantized import direct, direct_kernel
from llmcore_triton.quantized.packing import Packing

H200 = DeviceInfo("cuda", "NVIDIA H200", capability=90, processors=132)
REGISTRY = build_registry(Config(discovered=select(None).plugins))
FOUR = Scheme(codes="u4", group=128, zeros=True)


def context(scheme: Scheme, inputs: int, outputs: int, gated: bool = False, bucket: int = 0, **more: Any) -> OpContext:
    op = ("linear.w4a16" if scheme.codes == "u4" else "linear.w8a16") + ("_silu_and_mul" if gated else "")
    shape = shape_of(scheme, inputs, outputs * (1 + gated), False, "silu_and_mul" if gated else None)
    where = {"device": H200, "dtype": "bf16", **more}
    return OpContext(op=op, bucket=bucket, shape=shape, **where)


def chosen(asked: OpContext) -> tuple[str, str]:
    """The kernel, and why direct declines."""
    found = resolve(candidates_for(REGISTRY, asked.op), asked, {})
    return found.chosen.name, found.reasons.get("direct", "")


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("bucket", [0, 1])
def test_the_least_time_wins(bucket: int, gated: bool, measured: Any) -> None:
    asked = context(FOUR, 4096, 4096, gated, bucket)
    measured(asked, small_rows=8.0, direct=6.0)
    assert chosen(asked)[0] == "direct"
    measured(asked, small_rows=5.0, direct=6.0)
    assert chosen(asked)[0] == "small_rows"


def test_why_it_declines(measured: Any) -> None:
    cases = (
        (context(FOUR, 4096, 4096), "nobody has measured"),
        (context(FOUR, 4096, 4096, bucket=2), "is for steps of"),
        (context(FOUR, 4096 + 128, 4096), "has 128 and 4224"),
        (context(replace(FOUR, group=32), 4096, 4096), "has 32 and 4096"),
        (context(replace(FOUR, scale="f32"), 4096, 4096), "no room for zeros"),
        (context(FOUR, 4096, 4096, deterministic=True), "may depend"),
    )
    for asked, why in cases:
        name, reason = chosen(asked)
        assert name != "direct" and why in reason
    eight = context(Scheme(codes="i8"), 4096 + 128, 4096)
    measured(eight, direct=6.0, small_rows=7.0)
    assert chosen(eight)[0] == "direct", "a block of 8 bits has 128 inputs"


def test_gluon_is_not_for_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton.knobs.runtime, "interpret", True)
    assert "interpreter" in chosen(context(FOUR, 4096, 4096))[1]


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("inputs", [256, 4096, 14336])
def test_configurations(inputs: int, gated: bool) -> None:
    where = context(FOUR, inputs, 4096, gated)
    configs = list(direct.candidates(where))
    assert 4 <= len(configs) <= 8
    blocks = Packing(where).blocks.total
    for config in configs:
        assert config["warps"] * 32 * config["per_processor"] * direct.registers(config) <= 65536
        assert 1 <= config["ahead"] <= max(blocks // config["warps"], 1) + 1
        assert isinstance(direct.make_with(where, config), direct.Direct)


def test_blocks_of_other_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="whole blocks of 64 words"):
        direct.make_with(context(replace(FOUR, group=32), 4096, 4096), {})
    with pytest.raises(ValueError, match="whole blocks of 64 words"):
        direct.make_with(context(FOUR, 4096 + 64, 4096), {})


def test_the_order_of_a_part_gives_each_thread_what_it_loaded() -> None:
    """The tensor cores' thread t of four has places 2t, 2t + 1, 2t + 8 and 2t + 9 of each 16, as PTX says.

    `_ordered` must put there four neighbours of the thread's own 16 bytes.
    """
    at = torch.arange(direct_kernel.WORDS.value)
    order = at.reshape(2, 4, 2, 2, 2).permute(0, 2, 3, 1, 4).reshape(4, 16)
    layout = direct_kernel.loads_of(8, 4)
    assert sorted(order.flatten().tolist()) == at.tolist()
    lanes = [basis[2] for basis in layout.lane_bases]
    registers = [basis[2] for basis in layout.reg_bases if basis[2]]
    for t in range(4):
        own = torch.tensor([2 * t, 2 * t + 1, 2 * t + 8, 2 * t + 9])
        base = sum(lanes[bit] for bit in range(2) if t >> bit & 1)
        held = {base + sum(registers[bit] for bit in range(4) if i >> bit & 1) for i in range(16)}
        taken = order[:, own]
        assert set(taken.flatten().tolist()) == held
        assert torch.equal(taken, taken[:, :1] + torch.arange(4)), "two pairs of neighbouring registers"


def compiled_calls(
    where: OpContext, config: dict[str, Any], tokens: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> list[Any]:
    """The compiled kernels of a call."""
    compiled = compiling(folder, monkeypatch)
    kernel = direct.make_with(where, config)
    inputs, outputs = kernel._sizes.inputs, kernel._sizes.outputs
    rows = outputs * (1 + where.op.endswith("_silu_and_mul"))
    x = torch.zeros(tokens, inputs, dtype=torch.bfloat16)
    codes = torch.zeros(rows, inputs // 2, dtype=torch.uint8)
    scale = torch.ones(rows, inputs // 128, dtype=torch.float16)
    out = kernel(x, codes, scale, torch.zeros(rows, inputs // 128, dtype=torch.uint8), None)
    assert out.shape == (tokens, outputs) and out.dtype == torch.bfloat16
    return compiled


@pytest.mark.parametrize(
    ("gated", "tokens", "inputs"),
    [pytest.param(False, 1, 14336, marks=pytest.mark.compiled), (True, 1, 4096), (False, 16, 4096)],
)
def test_what_the_compiler_makes(
    gated: bool, tokens: int, inputs: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loads of 16 bytes, products, and nothing between: no register is spilled, and sums meet once at the end."""
    where = context(replace(FOUR, scale="f16"), inputs, 64, gated)
    (one,) = compiled_calls(where, {}, tokens, tmp_path, monkeypatch)
    sass = instructions(one, tmp_path)
    words = len(re.findall(r"LDG\.E\.EF\.128", sass))
    products = len(re.findall(r"\bHMMA\.16816", sass))
    # four loads of words feed 16 products of 8 tokens
    assert words and products >= 4 * words * (1 + tokens // 16)
    assert not re.findall(r"\b(?:LDL|STL|SHFL)\b", sass)
    assert len(re.findall(r"\bBAR\.SYNC", sass)) == (3 if gated else 1)
    assert "STS" not in sass[: sass.index("HMMA")]
