"""linear.w4a16=warpgroups and its relatives: when it is chosen, how calls are cut, and what a Hopper's compiler makes.

Gluon does not run in Triton's interpreter, so results are checked on GPUs: `llmcore kernels linear.w4a16 --check`.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from compiled_for_hopper import compiling, instructions
from llmcore.api.specs import DeviceInfo, OpContext
from llmcore_quantization.canonical import Scheme
from llmcore_quantization.ops import shape_of
from llmcore_triton.quantized import warpgroups
from llmcore_triton.quantized.packing import Packing
from llmcore_triton.specs import quantized as specs

# tensors are on the CPU
HOPPER = DeviceInfo("cpu", "NVIDIA H200", capability=90, processors=132)
FOUR = Scheme(codes="u4", group=128, zeros=True, scale="f16")
SIZES = ((4096, 28672), (14336, 4096), (4096, 6144), (4096, 4096))


def context(scheme: Scheme, inputs: int, outputs: int, gated: bool = False, bucket: int = 3) -> OpContext:
    op = ("linear.w4a16" if scheme.codes == "u4" else "linear.w8a16") + ("_silu_and_mul" if gated else "")
    shape = shape_of(scheme, inputs, outputs * (1 + gated), False, "silu_and_mul" if gated else None)
    return OpContext(op=op, dtype="bf16", bucket=bucket, shape=shape, device=HOPPER)


@pytest.mark.parametrize(("scheme", "gated"), [(FOUR, False), (FOUR, True), (Scheme(codes="i8"), True)])
@pytest.mark.parametrize("bucket", [2, 3])
@pytest.mark.parametrize("sizes", SIZES)
def test_every_configuration_fits(sizes: tuple[int, int], bucket: int, scheme: Scheme, gated: bool) -> None:
    where = context(scheme, *sizes, gated, bucket)
    for config in [warpgroups.DEFAULT, *warpgroups.candidates(where)]:
        kernel = warpgroups.make_with(where, config)
        for tokens in (65, 128, 200, 256, 300, 1024):
            plan = kernel._plan(tokens)
            x_stages, w_stages = warpgroups.stages_of(where, kernel._config, plan.padded)
            assert min(x_stages, w_stages) >= 2
            assert plan.padded <= kernel._config["tokens"]


def test_how_a_call_is_cut() -> None:
    """Into whole tiles, or into equal shares where those save more steps than adding parts takes."""

    def cut(outputs: int, count: int, **config: Any) -> tuple[int, int]:
        plan = warpgroups.make_with(context(FOUR, 4096, outputs), config)._plan(count)
        return plan.programs, plan.steps

    assert cut(6144, 128) == (128, 6), "48 tiles of 16 steps, in equal shares"
    assert cut(6144, 256) == (96, 16), "96 tiles: equal shares would save 4 steps of 16"
    assert cut(6144, 128, joining=4096) == (48, 16)
    assert cut(28672, 128) == (112, 32), "224 tiles, two for a program"
    assert cut(28672, 128, tokens=256, joined=1) == (112, 16), "112 tiles of twice as many rows"


def test_parts_have_room() -> None:
    kernel = warpgroups.make_with(context(FOUR, 14336, 4096), {})
    for tokens in (65, 256, 1024):
        plan = kernel._plan(tokens)
        shared = plan.steps % kernel._form.blocks.total != 0
        assert plan.partials.numel() >= (plan.programs * 128 * plan.padded if shared else 1)
        assert plan.arrivals.numel() >= (32 * -(-tokens // plan.padded) if shared else 1)


@pytest.mark.parametrize("scheme", [FOUR, Scheme(codes="i8")])
def test_many_tokens_are_dequantized_for_cublas(scheme: Scheme, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    class Scratch:
        def multiply(self, x: torch.Tensor, *weight: Any) -> torch.Tensor:
            seen.append(len(x))
            return x

    monkeypatch.setattr(warpgroups.scratch, "make", lambda context: Scratch())
    kernel = warpgroups.make_with(context(scheme, 256, 128, bucket=4), {})
    kernel.multiply(torch.zeros(warpgroups.MOST + 1, 256), torch.zeros(1), torch.zeros(1), None)
    assert seen == [warpgroups.MOST + 1]
    assert warpgroups.make_with(context(scheme, 256, 128), {})._scratch is None


def test_blocks_of_other_sizes_are_refused() -> None:
    where = context(Scheme(codes="u4", group=32, zeros=True, scale="f16"), 4096, 4096)
    with pytest.raises(ValueError, match="needs blocks of 64 words"):
        warpgroups.make_with(where, {})
    (spec,) = (s for s in specs.weight_only_kernels() if (s.op, s.name) == (where.op, "warpgroups"))
    assert spec.refuses is not None
    assert "has 32 and 4096" in (spec.refuses(where) or "")
    assert "nobody has measured" in (spec.refuses(context(FOUR, 4096 + 256, 4096)) or "")


def test_stages_that_would_never_be_free_are_refused() -> None:
    with pytest.raises(ValueError, match="more products in flight than a stage"):
        warpgroups.make_with(context(FOUR, 4096, 4096), {"depth": 64, "joined": 1})


@pytest.mark.parametrize(
    ("scheme", "gated", "tokens"),
    [
        pytest.param(FOUR, False, 2048, marks=pytest.mark.compiled),
        (FOUR, True, 128),
        pytest.param(Scheme(codes="i8"), False, 128, marks=pytest.mark.compiled),
        pytest.param(Scheme(codes="i8"), False, 256, marks=pytest.mark.compiled),
    ],
)
def test_what_the_compiler_makes(
    scheme: Scheme, gated: bool, tokens: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A product goes on while the next weights are converted."""
    compiled = compiling(tmp_path, monkeypatch)
    where = context(scheme, 512, 1024, gated)
    kernel = warpgroups.make_with(where, {"tokens": min(tokens, 256)})
    form, rows = Packing(where), 1024 * (1 + gated)
    words = torch.zeros(rows, form.blocks.total * form.blocks.words, dtype=torch.int16)
    marks = torch.zeros(512 // (scheme.group or 512), rows, dtype=torch.int32 if scheme.zeros else torch.float32)
    out = kernel(torch.zeros(tokens, 512, dtype=torch.bfloat16), words, marks)
    assert out.shape == (tokens, 1024) and out.dtype == torch.bfloat16
    (one,) = compiled
    assert one.metadata.shared <= 227 << 10
    sass = instructions(one, tmp_path)
    assert not re.search(r"\b(?:LDL|STL)\b", sass), "no register is spilled, while results are written either"
    products = len(re.findall(r"\bHGMMA\.", sass))
    flight = kernel._config["flight"]
    waits = re.findall(r"WARPGROUP\.DEPBAR\.LE gsb0, (0x\d)", sass)
    # those of the loop wait for the product before, and the last one is after it. If registers were short, each would
    # wait for itself
    assert products == 16
    assert waits.count(f"0x{flight}") == products and waits.count("0x0") == 1
    # scales are converted at the end of the step before. If they were here, a step would wait for the next one's
    start = sass.split("HGMMA.", 1)[0].rsplit("SYNCS.PHASECHK", 2)[1]
    assert "LDSM" in start and "HADD2.F32" not in start
