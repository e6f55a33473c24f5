"""Which steps are captured, to what sizes they are padded, and what happens when that cannot go on."""

from __future__ import annotations

import numpy as np
import pytest
from llmcore.engine.graphs import CAPTURED_AT, Frame, Graphs, frame_of, padded
from llmcore.sched.plan import StepPlan


def plan(n_query: list[int], n_decode: int, samples: int) -> StepPlan:
    rows = np.arange(len(n_query), dtype=np.int32)
    return StepPlan(
        number=0,
        request=rows,
        n_query=np.array(n_query, np.int32),
        reserve=np.array(n_query, np.int32),
        start=np.zeros_like(rows),
        want=np.zeros(rows.size, np.uint8),
        n_decode=n_decode,
        sample_row=rows[:samples],
        sample_request=rows[:samples],
    )


def test_sizes() -> None:
    sizes = {rows: padded(rows) for rows in (1, 2, 3, 5, 8, 9, 33, 64, 65, 81, 256, 257)}
    assert list(sizes.values()) == [1, 2, 4, 8, 8, 16, 40, 64, 80, 96, 256, 320]


@pytest.mark.parametrize(
    ("n_query", "n_decode", "samples", "frame"),
    [
        ([1, 1, 1], 3, 3, Frame(4, 4, 4, mixed=False)),
        ([1] * 17, 17, 17, None),
        ([1, 1, 9], 2, 3, Frame(16, 16, 4, mixed=True)),
        ([300], 0, 1, Frame(320, 320, 1, mixed=True)),
        ([300], 0, 0, Frame(320, 320, 0, mixed=True)),
        ([1, 512], 1, 2, None),
    ],
)
def test_frames(n_query: list[int], n_decode: int, samples: int, frame: Frame | None) -> None:
    assert frame_of(plan(n_query, n_decode, samples), 16) == frame


class Device:
    """Captures whatever it is given, 10 bytes each; may fail."""

    def __init__(self) -> None:
        self.graph_memory = 0
        self.broken = False
        self.done: list[str] = []

    def synchronize(self) -> None:
        self.done.append("synchronize")

    def capture(self, work):
        if self.broken:
            raise RuntimeError("cannot be captured")
        self.graph_memory += 10
        device = self

        class Graph:
            def replay(self) -> None:
                device.done.append("replay")

        return Graph(), "captured"


def run(graphs: Graphs[str], key: str, layout: int = 0) -> str:
    return graphs.run(key, layout, lambda: "launched")


def test_a_step_is_captured_when_it_comes_often() -> None:
    device = Device()
    graphs: Graphs[str] = Graphs(device, 1000)  # type: ignore[arg-type]
    launched = ["launched"] * (CAPTURED_AT - 1)
    assert [run(graphs, "a") for _ in range(CAPTURED_AT + 1)] == [*launched, "captured", "captured"]
    assert device.done == ["synchronize", "replay", "replay"] and len(graphs) == 1
    assert run(graphs, "a", layout=1) == "launched", "its inputs lie elsewhere now"


def test_memory_for_graphs_ends() -> None:
    graphs: Graphs[str] = Graphs(Device(), 20)  # type: ignore[arg-type]
    got = {key: [run(graphs, key) for _ in range(CAPTURED_AT)][-1] for key in "abc"}
    assert got == {"a": "captured", "b": "captured", "c": "launched"}


def test_what_cannot_be_captured_runs_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    device = Device()
    device.broken = True
    graphs: Graphs[str] = Graphs(device, 20)  # type: ignore[arg-type]
    assert {run(graphs, "a") for _ in range(CAPTURED_AT + 1)} == {"launched"}
    assert "cannot be captured" in caplog.text
