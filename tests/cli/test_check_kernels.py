"""`llmcore kernels --check`: right kernels pass, wrong ones are named with the reason, others say why they decline."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result
from llmcore.cli.kernels import command
from llmcore.ops import attn_gqa_decode, attn_gqa_mixed, attn_gqa_prefill, draw, drawing, rms_norm
from llmcore.ops.attention import shape_of
from llmcore.ops.check import compare
from llmcore.specs import AttnSpec, DeviceInfo, OpContext

SHAPES = len(getattr(rms_norm, "SHAPES", ({},)))

HEAD = """
import torch
from llmcore.api import KernelSpec, Requires, hookimpl

@hookimpl
def register_kernels():
    yield KernelSpec(op="rms_norm", name="mine", make=f"{__name__}:make", when=Requires(REQUIRES))
"""

RIGHT = """
def make(context):
    def run(x, weight, eps):
        wide = x.float()
        return (wide * (wide.pow(2).mean(-1, keepdim=True) + eps).rsqrt() * weight).to(x.dtype)
    return run
"""

WRONG = """
def make(context):
    return lambda x, weight, eps: torch.nn.functional.rms_norm(x, weight.shape, None, eps)
"""

UNWRITTEN = """
def make(context):
    def run(x, weight, eps):
        out = torch.empty_like(x)
        out[:-1] = torch.nn.functional.rms_norm(x, weight.shape, weight, eps)[:-1]
        return out
    return run
"""


def check(tmp_path: Path, code: str, *options: str, requires: str = "") -> tuple[Result, dict[str, dict]]:
    file = tmp_path / "mine.py"
    file.write_text(HEAD.replace("REQUIRES", requires) + code)
    arguments = ["rms_norm", "--check", "--json", "--device", "cpu", "--plugins", str(file), *options]
    result = CliRunner().invoke(command, arguments)
    return result, {row["dtype"]: row for row in json.loads(result.stdout)}


def test_a_right_kernel_passes_in_every_dtype_and_bucket(tmp_path: Path) -> None:
    result, rows = check(tmp_path, RIGHT)
    assert result.exit_code == 0 and set(rows) == {"f32", "f16", "bf16"}
    # three samples for each of eight token counts
    assert all(row["cases"] == 24 * SHAPES and 0 <= row["worst"] <= 1 and not row["failures"] for row in rows.values())
    assert "seed" in result.stderr


def test_a_wrong_kernel_is_named_and_the_exit_code_says_so(tmp_path: Path) -> None:
    result, rows = check(tmp_path, WRONG, "--dtype", "fp32", "--seed", "3")
    assert result.exit_code == 1 and rows["f32"]["failed"] == 5 * SHAPES
    first = rows["f32"]["failures"][0]
    assert first.startswith("1 tokens") and "rms_norm, samples 1, output 0: off by" in first


def test_what_a_kernel_leaves_unwritten_is_found(tmp_path: Path) -> None:
    result, rows = check(tmp_path, UNWRITTEN, "--dtype", "fp32")
    assert result.exit_code == 1 and "NaN where the reference has none" in rows["f32"]["failures"][0]


def test_a_kernel_for_another_device_declines(tmp_path: Path) -> None:
    result, rows = check(tmp_path, RIGHT, requires="device='abacus'")
    assert result.exit_code == 0 and rows["f16"]["declined"] == "needs device abacus, has cpu"


def test_several_processes_share_the_work(tmp_path: Path) -> None:
    result, rows = check(tmp_path, WRONG, "--jobs", "2", "--seed", "7")
    assert result.exit_code == 1 and {row["failed"] for row in rows.values()} == {5 * SHAPES}


def test_an_op_that_does_not_exist(tmp_path: Path) -> None:
    assert "there is no op 'rmsnorm'" in str(CliRunner().invoke(command, ["rmsnorm", "--check"]).exception)


def test_inputs_are_drawn_anew_for_every_seed() -> None:
    context = OpContext(op="linear", device=DeviceInfo("cpu"), dtype="f32")
    plain = draw(context, 4)
    with drawing(5, torch.device("cpu")):
        other = draw(context, 4)
    assert not torch.equal(plain, other) and torch.equal(plain, draw(context, 4))


@pytest.mark.parametrize("module", [attn_gqa_decode, attn_gqa_prefill, attn_gqa_mixed])
def test_long_attention_is_held_to_the_size_of_each_result(module) -> None:
    shape = shape_of(AttnSpec(heads=4, kv_heads=1, key_size=8, value_size=8, scale=8**-0.5))
    context = OpContext(op="attn", device=DeviceInfo("cpu"), dtype="bf16", layout="token", bucket=1, shape=shape)
    kernel = module.make(context)
    run = kernel.run

    def forgets_the_first_half(q, k_new, v_new, kv, meta, out, lse=None):
        table = meta["table"].clone()
        for row, length in zip(meta["request"].tolist(), meta["kv_len"].tolist(), strict=True):
            table[row, : length // 2] = table[row, length // 2 : 2 * (length // 2)]
        return run(q, k_new, v_new, kv, {**meta, "table": table}, out, lse)

    sample = next(module.long_samples(context))
    assert compare(module, kernel, context, sample, torch.device("cpu"), long=True) < 1
    kernel.run = forgets_the_first_half
    with pytest.raises(AssertionError, match="off by"):
        compare(module, kernel, context, sample, torch.device("cpu"), long=True)
