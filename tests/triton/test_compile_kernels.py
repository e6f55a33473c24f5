"""Kernels over quantized KV and over quantized experts compile for a Hopper without one, and fit."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "compile_kernels.py"
pytestmark = pytest.mark.compiled

COLUMNS = ("kernel", "registers", "spills", "shared", "tensor_cores", "loop", "seconds")


@pytest.mark.parametrize(
    ("mode", "kernels"), [("triton_int8kv", ["rotate_and_store", "grouped"]), ("quant_policy_4", ["flash"])]
)
def test_what_kernels_over_codes_take(mode: str, kernels: list[str], tmp_path: Path) -> None:
    rows = compiled(tmp_path, "--mode", mode, "--kernels", *kernels)
    assert {row["kernel"] for row in rows} == set(kernels)
    for row in rows:
        # attention multiplies on tensor cores, in a loop; a write does neither
        assert (int(row["tensor_cores"]) > 0) == (int(row["loop"]) > 1) == (row["kernel"] != "rotate_and_store")


def test_quantized_experts_are_multiplied_on_tensor_cores(tmp_path: Path) -> None:
    """Those of Qwen3-30B-A3B for few tokens: their operands never leave the registers."""
    sizes = ("moe_intermediate_size=768", "num_experts=8", "num_experts_per_tok=4")
    chosen = ("--model", "qwen3-30b-a3b", "--mode", "triton_w4a16", "--kernels", "unsorted", "--size", *sizes)
    rows = compiled(tmp_path, *chosen)
    assert len(rows) >= 2 and all(int(row["tensor_cores"]) > 0 for row in rows)
    assert all(int(row["registers"]) <= 128 for row in rows), "four programs share a multiprocessor"


def compiled(folder: Path, *arguments: str) -> list[dict[str, str]]:
    """What each kernel takes. None spills registers."""
    command = [sys.executable, str(SCRIPT), *arguments, "--steps", "1"]
    given = os.environ | {"OMP_NUM_THREADS": "1", "TRITON_CACHE_DIR": str(folder)}
    done = subprocess.run(command, capture_output=True, text=True, env=given)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [dict(zip(COLUMNS, line.split(), strict=False)) for line in done.stdout.splitlines()[2:]]
    for row in rows:
        assert row["spills"] == "0"
        assert 0 < int(row["registers"]) <= 255
    return rows
