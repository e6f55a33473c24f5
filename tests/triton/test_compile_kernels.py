"""Kernels over quantized KV compile for a Hopper without one, and fit."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "compile_kernels.py"
COLUMNS = ("kernel", "registers", "spills", "shared", "tensor_cores", "loop", "seconds")


@pytest.mark.parametrize(
    ("mode", "kernels"), [("triton_int8kv", ["rotate_and_store", "grouped"]), ("quant_policy_4", ["flash"])]
)
def test_what_kernels_over_codes_take(mode: str, kernels: list[str], tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--mode", mode, "--kernels", *kernels, "--steps", "1"]
    given = os.environ | {"OMP_NUM_THREADS": "1", "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, env=given)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [dict(zip(COLUMNS, line.split(), strict=False)) for line in done.stdout.splitlines()[2:]]
    assert {row["kernel"] for row in rows} == set(kernels)
    for row in rows:
        assert row["spills"] == "0"
        assert 0 < int(row["registers"]) <= 255
        # attention multiplies on tensor cores, in a loop; a write does neither
        assert (int(row["tensor_cores"]) > 0) == (int(row["loop"]) > 1) == (row["kernel"] != "rotate_and_store")
