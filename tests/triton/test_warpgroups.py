"""linear.w4a16=warpgroups and its relatives: when it is chosen, how calls are cut, and what a Hopper's compiler makes.

Gluon does not run in Triton's interpreter, so results are checked on GPUs: `llmcore kernels linear.w4a16 --check`.
"""

from __future__ import annotations

import re
from pathlib import Path

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
            for cut in kernel.cuts(tokens):
                config = kernel._config
                x_stages, w_stages = warpgroups.stages_of(where, config, cut.rows, cut.tokens)
                x, w = config["joined"] * cut.tokens * 64 * 2, cut.rows * config["step"]
                shared = x_stages * x + w_stages * (w // 2 if scheme.codes == "u4" else w)
                assert min(x_stages, w_stages) >= 2
                assert (shared + 2048 * config["warps"] + 2 * 1024) * config["per_processor"] <= 228 * 1024


def test_how_a_call_is_cut() -> None:
    """Into whole tiles. The last ones are cut into equal shares if that saves more steps than adding parts takes."""

    def cut(inputs: int, outputs: int, count: int, tokens: int) -> tuple[int, ...]:
        config = {**warpgroups.DEFAULT, "tokens": tokens, "flight": 1}
        return warpgroups.make_with(context(FOUR, inputs, outputs, bucket=4), config)._plan(count).cut

    assert cut(14336, 4096, 128, 128) == (128, 128, 128, 0, 14), "32 tiles of 56 steps, in equal shares"
    assert cut(4096, 6144, 256, 128) == (128, 128, 96, 0, 16), "96 tiles: equal shares would save 4 steps of 16"
    assert cut(4096, 28672, 128, 128) == (128, 128, 112, 1, 16), "224 tiles, two for a program"
    assert cut(14336, 4096, 9 * 128, 128) == (128, 128, 132, 1, 67), "288 tiles: 132 whole ones, 156 in equal shares"


def test_tiles_of_a_call() -> None:
    """A call has other tiles than wide ones, if those would be half empty, or few."""

    def tile(outputs: int, count: int) -> tuple[int, ...]:
        config = {**warpgroups.DEFAULT, "tokens": 256}
        return warpgroups.make_with(context(FOUR, 4096, outputs, bucket=4), config)._plan(count).cut[:2]

    assert tile(28672, 2048) == (128, 256)
    assert tile(28672, 344) == (256, 128)
    assert tile(4096, 344) == (128, 128)
    assert warpgroups.shapes(warpgroups.DEFAULT, 20) == [(128, 32)]
    assert warpgroups.shapes(warpgroups.DEFAULT, 65) == [(128, 128)]


def test_parts_have_room() -> None:
    kernel = warpgroups.make_with(context(FOUR, 14336, 4096, bucket=4), {"tokens": 256})
    for tokens in (65, 256, 600, 1024, 2000):
        (rows, padded, programs, whole, steps), _, partials, arrivals = kernel._plan(tokens)
        tiles = 4096 // rows * -(-tokens // padded) - whole * programs
        assert programs <= 132 and programs * steps >= tiles * kernel._k_steps
        if steps % kernel._k_steps:
            assert partials.numel() >= programs * rows * padded
            assert arrivals.numel() >= tiles


@pytest.mark.parametrize(("outputs", "shapes"), [(4096, 3), (28672, 2)])
def test_the_first_call_launches_each_kernel(outputs: int, shapes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """So none is compiled while requests wait."""
    launched: list[tuple[int, ...]] = []
    kernel = warpgroups.make_with(context(FOUR, 4096, outputs, bucket=4), {"tokens": 256})
    monkeypatch.setattr(kernel, "_run", lambda x, *others: launched.append(kernel._plan(len(x)).cut[:2]))

    def call(tokens: int) -> None:
        kernel.multiply(torch.zeros(1, 4096).expand(tokens, 4096), torch.zeros(1), torch.zeros(1), None)

    call(300)
    first = set(launched[:-1])
    assert len(first) == len(launched) - 1 == shapes
    del launched[:]
    counts = range(257, 16384, 100)
    for tokens in counts:
        call(tokens)
    assert len(launched) == len(counts) and set(launched) == first


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
