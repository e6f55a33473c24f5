"""linear.w8a8=warpgroups: how calls are cut, and what a Hopper's compiler makes of the kernels. No GPU needed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from compiled_for_hopper import compiling, instructions
from llmcore.api.specs import DeviceInfo, OpContext
from llmcore_triton import tuned
from llmcore_triton.quantized import codes_cublas, codes_many_rows, codes_warpgroups
from llmcore_triton.quantized.codes_warpgroups import Choice

# tensors are on the CPU
HOPPER = DeviceInfo("cpu", "NVIDIA H200", capability=90, processors=132)
SIZES = ((4096, 28672), (14336, 4096), (4096, 6144), (4096, 4096))
TYPES = {"i8": torch.int8, "e4m3": torch.float8_e4m3fn}


def context(codes: str, inputs: int, outputs: int, bucket: int, group: int = 0) -> OpContext:
    shape = {"inputs": inputs, "outputs": outputs, "bias": True, "codes": codes, "group": group}
    op = "linear.fp8_block" if group else "linear.w8a8"
    return OpContext(op=op, dtype="bf16", bucket=bucket, shape=shape, device=HOPPER)  # type: ignore[arg-type]


@pytest.mark.parametrize(("codes", "group", "sums"), [("i8", 0, 128), ("e4m3", 128, 64)])
@pytest.mark.parametrize("bucket", [3, 4])
@pytest.mark.parametrize("sizes", SIZES)
def test_every_configuration_fits(sizes: tuple[int, int], bucket: int, codes: str, group: int, sums: int) -> None:
    """Into registers, shared memory and the memory for sums."""
    where = context(codes, *sizes, bucket, group)
    for config in [codes_warpgroups.DEFAULT, *codes_warpgroups.candidates(where)]:
        kernel = codes_warpgroups.make_with(where, config)
        assert config["m"] * kernel._widths[0] <= 128 * sums, "of a thread"
        for n in kernel._widths:
            assert codes_warpgroups.stages_of(where, config, n) >= 4
        for tokens in (1, 65, 128, 256, 300, 512, 2048, 8192):
            for choice in kernel.choices(tokens):
                assert choice.parts == 1 or kernel.tiles(tokens, choice.n) * choice.parts <= 132
                assert choice.parts == 1 or choice.parts * tokens * sizes[1] <= kernel._sums.numel()


def test_how_a_call_is_cut() -> None:
    """Narrow tiles for as many programs as there are, and shared ones if even those are few."""

    def choose(inputs: int, outputs: int, tokens: int, **config: Any) -> Choice:
        return codes_warpgroups.make_with(context("i8", inputs, outputs, 4), config).choose(tokens)

    assert choose(4096, 28672, 2048) == (256, 1)
    assert choose(4096, 4096, 512) == (128, 1)
    assert choose(4096, 4096, 2048) == (256, 1)
    assert choose(14336, 4096, 128, n=128).parts == 4
    assert choose(14336, 4096, 128, n=128, parts=1) == (64, 1)
    assert choose(256, 4096, 128, n=128).parts <= 2, "no more than there are steps"


@pytest.mark.parametrize("kernel", [codes_many_rows, codes_warpgroups])
def test_cublas_multiplies_the_most_tokens(kernel: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    measured = {"e4m3": {"us": 1.0, "config": {}}}
    monkeypatch.setattr(tuned, "find", lambda kernel, where: measured.get(where.shape["codes"]))
    monkeypatch.setattr(codes_cublas.Cublas, "__call__", lambda self, x, *others: seen.append(len(x)))
    kernel.make_with(context("e4m3", 512, 1024, 4), {})(torch.zeros(2049, 512), None, None, None)
    assert seen == [2049]
    assert kernel.make_with(context("i8", 512, 1024, 4), {})._cublas is None


@pytest.mark.parametrize(("codes", "n"), [pytest.param("i8", 256, marks=pytest.mark.compiled), ("e4m3", 128)])
def test_what_the_compiler_makes(codes: str, n: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first call compiles all kernels. No product waits for the one before it, and no register is spilled.

    The loop of products carries the stage that becomes free. Triton drops it if it starts as another carried number.
    """
    compiled = compiling(tmp_path, monkeypatch)
    kernel = codes_warpgroups.make_with(context(codes, 512, 1024, 4), {"n": n})
    x, weight = (torch.zeros(rows, 512, dtype=torch.int8).view(TYPES[codes]) for rows in (300, 1024))
    bias = torch.ones(1024, dtype=torch.bfloat16) if codes == "i8" else None
    out = kernel(x, torch.ones(300, 1), weight, torch.ones(1024, 1), bias)
    assert out.shape == (300, 1024) and out.dtype == torch.bfloat16
    products = [one for one in compiled if one.metadata.name == "codes_times_codes"]
    assert len(products) == 4, "two widths, whole tiles and shared ones"
    for one in products:
        assert one.metadata.shared <= 227 << 10
        assert len(re.findall(r"scf\.for .* -> \(i32, i32, i32, tensor<", one.asm["ttgir"])) == 2, "one for each team"
        sass = instructions(one, tmp_path)
        assert len(re.findall(r"\b[IQ]GMMA\.", sass)) >= 8
        # for each team one in the loop, after which one product goes on, and one after the loop
        assert sorted(re.findall(r"WARPGROUP\.DEPBAR\.LE gsb0, (0x\d)", sass)) == ["0x0", "0x0", "0x1", "0x1"]
        assert not re.findall(r"\b(?:LDL|STL)\b", sass)


def test_what_the_compiler_makes_of_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two products at a time, scales come while they are computed, and no register is spilled."""
    compiled = compiling(tmp_path, monkeypatch)
    kernel = codes_warpgroups.make_with(context("e4m3", 512, 1024, 4, 128), {})
    x, weight = (torch.zeros(rows, 512, dtype=torch.int8).view(TYPES["e4m3"]) for rows in (300, 1024))
    out = kernel(x, torch.ones(300, 4), weight, torch.ones(8, 4), torch.ones(1024, dtype=torch.bfloat16))
    assert out.shape == (300, 1024)
    products = [one for one in compiled if one.metadata.name == "codes_times_codes"]
    assert len(products) == 4
    for one in products:
        assert one.metadata.shared <= 227 << 10
        sass = instructions(one, tmp_path)
        # for each team those of a pair of steps, and that of a last step without another one
        assert re.findall(r"WARPGROUP\.DEPBAR\.LE gsb0, (0x\d)", sass) == 2 * ["0x1", "0x0", "0x0"]
        steps = re.findall(r"WARPGROUP\.ARRIVE.*?WARPGROUP\.DEPBAR", sass, re.DOTALL)
        assert [len(re.findall(r"QGMMA\.", step)) for step in steps] == 2 * [8, 4]
        assert all("LDG" in step for step in steps)
        assert not re.findall(r"\b(?:LDL|STL)\b", sass)
