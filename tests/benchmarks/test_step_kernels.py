"""benchmarks/step_kernels.py without a GPU: from a trace to rows, and the steps before the recorded ones."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from llmcore_devtools import write_fake_model
from llmcore_devtools.bench.engine_runs import BenchEngine

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def step_kernels(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("step_kernels")


def kernel(ts: float, dur: float, name: str, grid: int) -> dict[str, Any]:
    return {"cat": "kernel", "name": name, "ts": ts, "dur": dur, "args": {"grid": [grid, 1, 1]}}


def trace() -> Iterator[dict[str, Any]]:
    """Two steps of 100 us, each of one layer; the kernel `words` is three of its linears."""
    for start in (1000.0, 1100.0):
        yield {"cat": "gpu_memcpy", "name": "Memcpy HtoD", "ts": start + 20, "dur": 2.0, "args": {}}
        yield kernel(start + 90, 4.0, "void at::native::(anonymous namespace)::pick<float>(float*)", 1)
        yield kernel(start, 10.0, "norm", 1)
        yield kernel(start + 10, 20.0, "words", 132)
        yield kernel(start + 30, 5.0, "attend", 8)
        yield kernel(start + 34, 15.0, "words", 132)  # begins before the one before it ends
        yield kernel(start + 50, 40.0, "words", 64)


def test_a_kernel_has_a_row_for_each_place_and_grid(step_kernels: Any) -> None:
    rows = step_kernels.rows_of(trace(), 2)
    assert [tuple(row)[:5] for row in rows] == [
        ("words", "64x1x1", "words, at::native::pick", 1, 40),
        ("words", "132x1x1", "norm, attend", 1, 20),
        ("words", "132x1x1", "attend, words", 1, 15),
        ("norm", "1x1x1", "at::native::pick, words", 1, 10),
        ("attend", "8x1x1", "words, words", 1, 5),
        ("at::native::pick", "1x1x1", "words, norm", 1, 4),
        ("Memcpy HtoD", "", "", 1, 2),
    ]


def test_kernels_add_up_to_the_steps(step_kernels: Any) -> None:
    """Also the time before a kernel in which none runs, and not the time in which the one before still runs."""
    rows = step_kernels.rows_of(trace(), 2)
    added = {(row.name, row.between): row.added for row in rows}
    # the first step has no time before its first kernel
    assert added["norm", "at::native::pick, words"] == (10 + 16) / 2
    assert added["words", "attend, words"] == 14 and added["words", "words, at::native::pick"] == 41
    assert added["Memcpy HtoD", ""] == 0 and sum(row.added for row in rows) == 194 / 2


def test_time_without_a_kernel(step_kernels: Any) -> None:
    span, busy = step_kernels.spans(trace())
    assert (span, busy) == (194, 2 * (30 + 5 + 14 + 40 + 4))  # the copy runs beside a kernel
    assert step_kernels.spans([kernel(0, 9, "whole", 1), kernel(2, 3, "within", 1)]) == (9, 9)


def test_the_table_sums_up_what_is_small(step_kernels: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_kernels, "LEAST", 0.05)
    *_, rest, last = lines = list(step_kernels.table(list(trace()), 2, 0.09))
    assert len(lines) == 8 and rest.split()[:2] == ["2", "others"] and " 6.0 " in rest
    assert last == (
        "kernels 0.096 ms; a recorded step 0.097 ms, of which no kernel runs for 0.004 ms; a step that is not "
        "recorded 0.090 ms"
    )


def test_every_recorded_step_is_like_the_others(
    step_kernels: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = []

    def recorded(bench: BenchEngine) -> list[dict[str, Any]]:
        before = bench.engine.load()
        step_kernels.make_steps(bench, step_kernels.STEPS)
        after = bench.engine.load()
        seen.append((after.steps - before.steps, after.running, bench.engine.idle))
        return list(trace())

    arguments = ["--model", str(write_fake_model(tmp_path)), "--batches", "1", "3", "--prefill"]
    for setting in ("device=cpu", "max_req_total_len=512", "max_total_token_num=2048", "batch_max_tokens=32"):
        arguments += ["--set", setting]
    monkeypatch.setattr("sys.argv", ["step_kernels.py", *arguments])
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("os.environ", dict(os.environ))
    for name, value in (("recorded", recorded), ("DECODE", (16, 256)), ("PREFILL", (16, 1))):
        monkeypatch.setattr(step_kernels, name, value)
    assert step_kernels.main() == 0
    assert [(steps, idle) for steps, _, idle in seen] == [(step_kernels.STEPS, False)] * 3
    assert [running for _, running, _ in seen[:2]] == [1, 3]
    shown = capsys.readouterr().out
    assert [line for line in shown.splitlines() if line.startswith(("decode,", "prefill,"))] == [
        "decode, batch 1",
        "decode, batch 3",
        "prefill, 2 x 16",
    ]
