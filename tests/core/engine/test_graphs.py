"""Which steps are captured, to what sizes they are padded, and what happens when that cannot go on."""

from __future__ import annotations

import pytest
from llmcore.engine.graphs import CAPTURED_AT, Graphs


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
    return graphs.run(key, layout, lambda: "launched", graphs.decide(key, layout))


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
