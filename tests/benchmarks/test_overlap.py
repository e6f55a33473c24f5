"""benchmarks/overlap.py without a GPU: the rounds of one process, and the comparison of two processes."""

from __future__ import annotations

import argparse
import importlib
import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from llmcore_devtools import write_fake_model

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def overlap(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("overlap")


def test_rounds_have_the_same_tokens_and_batches_have_others(
    overlap: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(overlap, "PROMPT", 16)
    monkeypatch.setattr(overlap, "ANSWER", 5)
    settings = ["device=cpu", "max_req_total_len=64", "max_total_token_num=512"]
    options = argparse.Namespace(model=str(write_fake_model(tmp_path)), set=settings, batches=[1, 3])
    found = overlap.rounds(options)
    assert {batch: (len(digests), len(set(digests))) for batch, digests in found.items()} == {
        "1": (overlap.ROUNDS, 1),
        "3": (overlap.ROUNDS, 1),
    }
    assert len({*found["1"], *found["3"]}) == 2


@pytest.mark.parametrize(("overlapping", "code"), [(["a", "a", "a", "a"], 0), (["a", "b", "a", "a"], 1)])
def test_other_tokens_are_an_error(
    overlap: Any,
    overlapping: list[str],
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def run(command: Sequence[str], **_: Any) -> argparse.Namespace:
        digests = overlapping if command[-1] == "overlapping" else ["a"] * 4
        return argparse.Namespace(stdout=f"something else\n{json.dumps({'8': digests})}\n")

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("sys.argv", ["overlap.py"])
    assert overlap.main() == code
    assert f"in {4 - code} of 4 rounds, and these in 4" in capsys.readouterr().out
