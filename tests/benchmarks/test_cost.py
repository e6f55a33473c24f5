"""benchmarks/cost.py: the model of cost predicts what was measured, and what it predicts for others is possible."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from llmcore_devtools.bench.figures import Spread

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def cost(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("cost")


def test_the_figures_are_those_of_the_page(cost: Any) -> None:
    page = (ROOT / "docs" / "performance.md").read_text()
    known = {float(number.replace(",", "")) for number in re.findall(r"\d[\d,]*(?:\.\d+)?", page)}
    for name, figures in cost.MEASURED.items():
        assert set(figures["rows"].values()) <= known, name


def test_every_measured_row_is_predicted(cost: Any) -> None:
    found = {ranks: cost.predicted(cost.CONFIGS / cost.FITTED, ranks) for ranks in (1, 2)}
    off = {(ranks, row): found[ranks][row] / figure - 1 for ranks, row, figure in cost.fitted_rows()}
    assert len(off) == 14
    assert {place: error for place, error in off.items() if abs(error) > cost.WITHIN} == {}
    assert cost.fit() == cost.fit()


def test_the_constants_are_possible_on_an_h200(cost: Any) -> None:
    found = cost.fit()
    assert 0.5e-6 < found.launch < 3e-6 and 0 < found.tile < 5e-6
    assert 1e12 < found.rows < found.kv < 4.8e12, "memory reads 4.8 TB/s at most"
    assert 0 < found.wait < 0.15


def test_predictions_for_70b_on_two_gpus(cost: Any) -> None:
    found = cost.predicted(cost.CONFIGS / "llama-3.1-70b", 2)
    times = [found[f"decode_{batch}"] for batch in (1, 8, 32, 64, 128, 256)]
    read = 70.55e9 / cost.READ * 1e3
    assert times == sorted(times) and read < times[0] < 1.25 * read
    assert 0.5 < found["prefill"] * 2 * 70e9 / (2 * cost.MULTIPLY) < 1


def test_sums_are_measured_ones_and_long_ones_go_in_pieces(cost: Any) -> None:
    measured = {int(kib): us * 1e-6 for kib, us in cost.MEASURED["sums tp=2"]["rows"].items()}
    assert cost.sum_seconds(8 << 10) == pytest.approx(measured[8])
    assert measured[512] < cost.sum_seconds(768 << 10) < measured[1024]
    assert cost.sum_seconds(128 << 20) == pytest.approx(2 * measured[65536])


def test_models_that_it_is_not_for(cost: Any) -> None:
    assert cost.predicted(cost.CONFIGS / "deepseek-v2-lite", 1) == {}
    assert cost.predicted(cost.CONFIGS / "llama-3.1-8b", 4) == {}
    assert cost.predicted(cost.CONFIGS / "qwen3-8b", 1).keys() == cost.ROWS.keys()


def test_measured_rows_stand_beside_it(cost: Any) -> None:
    gpu = importlib.import_module("gpu")
    rows = [SimpleNamespace(key=key, title=key, unit="ms") for key in ("decode_1", "decode_8", "chat")]
    found = {"decode_1": Spread.of([1.07]), "decode_8": Spread.of([2.2]), "chat": Spread.of([9.0])}
    lines = gpu.beside_cost(rows, found, {"decode_1": 1.0, "decode_8": 2.0, "decode_32": 3.0})
    assert [line.split(", ", 1)[1] for line in lines] == [
        "decode_1: 1 ms, +7.0%: ok",
        "decode_8: 2 ms, +10.0%: MISSED: within 8%",
    ]
