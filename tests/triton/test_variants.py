"""What a server serves needs no kernel that its start did not compile."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "variants.py"
MODELS = ("llama-3.1-8b", "deepseek-v2-lite", "qwen1.5-moe-a2.7b", "gemma-3-4b-text")


@pytest.mark.parametrize(
    ("steps", "models", "modes"),
    [
        (150, MODELS, ()),
        (60, MODELS[:1], ("triton_int8kv",)),
    ],
)
def test_nothing_is_compiled_while_requests_are_served(
    steps: int, models: Sequence[str], modes: Sequence[str]
) -> None:
    """A compilation takes a second, in which everybody waits."""
    command = [sys.executable, str(SCRIPT), "--narrow", "--steps", str(steps), "--model", *models, "--mode", *modes]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(": 0 new ones") == len(models)
