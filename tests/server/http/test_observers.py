"""Plugins hear of requests that have ended beside the streams."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any, cast

import pytest
from llmcore.api.counters import TALLIES
from llmcore.api.protocols import RequestRecord
from llmcore.registry.registry import Registry
from llmcore_server.http import observers
from llmcore_server.http.observers import Observers


def record(number: int) -> RequestRecord:
    return cast(RequestRecord, SimpleNamespace(request_id=f"r-{number}"))


class Slow:
    """A registry whose one plugin takes as long as `may` is not set."""

    def __init__(self, *names: str) -> None:
        self.names = names
        self.told: list[str] = []
        self.begun, self.may = threading.Event(), threading.Event()

    def implementers(self, hook: str) -> list[Any]:
        assert hook == "on_request_finished"
        return [SimpleNamespace(name=name) for name in self.names]

    def call(self, hook: str, *, record: RequestRecord) -> None:
        self.begun.set()
        assert self.may.wait(60)
        self.told.append(record.request_id)


def of(registry: Slow) -> Observers:
    return Observers(cast(Registry, registry))


def failures(plugin: str) -> int:
    return TALLIES.figures().counts.get(("plugin_failures", (plugin, "on_request_finished")), 0)


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observers, "LAST_SECONDS", 60.0)


def test_nobody_waits_for_a_plugin_and_it_hears_of_all() -> None:
    registry = Slow("slow")
    told = of(registry)
    for number in range(3):
        told(record(number))
    assert registry.begun.wait(60) and registry.told == []
    registry.may.set()
    told.close()
    assert registry.told == ["r-0", "r-1", "r-2"]


def test_what_it_cannot_keep_up_with_is_dropped_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observers, "MOST", 2)
    registry = Slow("slow-aside")
    told = of(registry)
    told(record(0))
    assert registry.begun.wait(60)
    for number in range(1, 6):
        told(record(number))
    assert failures("slow-aside") == 3
    registry.may.set()
    told.close()
    assert registry.told == ["r-0", "r-1", "r-2"]


def test_the_end_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observers, "MOST", 1)
    monkeypatch.setattr(observers, "LAST_SECONDS", 0.01)
    registry = Slow("slow")
    told = of(registry)
    told(record(0))
    assert registry.begun.wait(60)
    told(record(1))
    told.close()
    assert registry.told == []
    registry.may.set()
