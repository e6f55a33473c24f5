"""benchmarks/gpu.py without a GPU: marks by mode, marks that multiply another run, the host's waiting, and steps that
were not replayed."""

from __future__ import annotations

import importlib
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from llmcore.api import ModeSpec
from llmcore.engine.graphs import Action
from llmcore_devtools.bench.figures import Spread
from llmcore_devtools.loaded_model import registry_for_tests

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("gpu")


def test_marks_are_for_known_models_modes_and_rows(gpu: Any) -> None:
    modes = {mode.name for mode, _ in registry_for_tests().specs(ModeSpec)}
    keys = {row.key for row in (*gpu.ROWS, *gpu.STARTS)}
    for name, chips in gpu.PEERS.items():
        model, *asked = (word for word in name.split() if not word.startswith("tp="))
        assert name == "ceilings" or (
            (gpu.CONFIGS / model).is_dir() and modes >= set(asked) and asked == sorted(asked)
        )
        assert name == "ceilings" or all(rows.keys() <= keys for rows in chips.values())


def test_a_mark_may_be_a_share_of_another_run(gpu: Any) -> None:
    rows = [row for row in gpu.ROWS if row.key in ("decode_8", "prefill")]
    found = {row.key: Spread.of([100.0]) for row in rows}
    marks = {key: {"must": "0.9x", "aim": "1.2x", "peer": None} for key in found}
    beside = {"decode_8": {"median": 90.0}, "prefill": {"median": 90.0}}
    _, decode, prefill = gpu.table(rows, found, marks, beside)
    assert " 81.0 " in decode and " 108.0 " in decode and decode.endswith("aim")
    assert prefill.endswith("must")
    assert [line.split()[-1] for line in gpu.table(rows, found, marks, {})[1:]] == ["1.2x", "1.2x"]


def test_waiting_for_the_device_is_counted_until_the_end(gpu: Any) -> None:
    class Event:
        def wait(self) -> None:
            time.sleep(0.02)

    class Device:
        def event(self) -> Event:
            return Event()

    device = Device()
    waits = gpu.Waits(SimpleNamespace(engine=SimpleNamespace(_device=device)))
    device.event().wait()
    waits.end()
    before = waits.seconds
    device.event().wait()
    assert 0.02 <= before == waits.seconds


def test_steps_that_were_not_replayed_are_counted(gpu: Any) -> None:
    """Those that a CUDA graph can run. The others have no frame."""

    class Runner:
        graph_rows = 8

        def decide(self, step: Any) -> Action:
            return Action(step.action)

    def decide(number: int, frame: object, action: Action) -> Action:
        plan = SimpleNamespace(number=number)
        made: Action = runner.decide(SimpleNamespace(plan=plan, frame=frame, action=action))
        return made

    runner, size = Runner(), object()
    for lead in (runner, SimpleNamespace(_runner=runner)):
        bench = gpu.Bench(SimpleNamespace(engine=SimpleNamespace(_runner=lead)), repeats=1, shrink=1)
        with bench.watched():
            assert decide(1, None, Action.LAUNCH) == Action.LAUNCH
            assert decide(2, size, Action.REPLAY) == Action.REPLAY
            assert decide(3, size, Action.LAUNCH) == Action.LAUNCH
            assert decide(4, size, Action.CAPTURE) == Action.CAPTURE
        decide(5, size, Action.LAUNCH)
        assert bench.rare == 2
