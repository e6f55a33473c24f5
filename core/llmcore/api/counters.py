"""Counters of a serving process: failures of plugins, error answers, gaps between tokens.

Each process has one set, as with logging, because every layer counts. A child reports its totals since its start to
the supervisor about once a second, so a lost report costs nothing.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field

COUNTS: Mapping[str, tuple[tuple[str, ...], str]] = {
    "plugin_failures": (("plugin", "where"), "Exceptions that a plugin raised and the server caught."),
    "error_answers": (("status", "code"), "HTTP answers of 400 and above; 429 and 503 are refusals under load."),
    "refused_bodies": (
        ("reason",),
        "Bodies that were not read to their end for want of room: their client had its share of it (share), there was "
        "none (full), or a client with less needed it (yielded).",
    ),
    "dropped_messages": (("process",), "Messages between processes that were malformed and dropped."),
    "dropped_log_lines": (("process",), "Log lines that were lost because nobody read the log."),
    "worker_restarts": ((), "HTTP workers that died and were replaced."),
    "engine_restarts": ((), "Engines that died or hung and were replaced."),
}
"""Name -> (labels, help) of every counter."""

GAP_SECONDS = (
    *(0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075),
    *(0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0),
)
"""Upper ends of the buckets of gaps between tokens; one more bucket holds longer gaps."""


CAUSES: Mapping[str, str] = {
    "client": "the client left",
    "slow_client": "the client did not read its answer fast enough",
    "deadline": "a time limit was over",
    "drain": "the server was shutting down",
    "overload": "there was no room",
    "engine": "the engine died or was lost",
    "refused": "the engine found the request wrong",
    "failure": "the model or a plugin failed on it",
}
"""Why a request ended early: `protocols.RequestRecord.cause` and what it means."""

Counted = tuple[str, tuple[str, ...]]
"""One counter: its name in COUNTS, and the values of its labels."""


@dataclass(frozen=True)
class ServerFigures:
    """Totals of all processes since the server started.

    `gaps`: the number of gaps between a choice's tokens in each bucket of GAP_SECONDS, () for none.
    `gap_seconds`: the sum of all gaps. `engines`: for each of several engines its figures (`bridge.Load.figures()`),
    and `up`, 1 while it serves.
    """

    counts: Mapping[Counted, int] = field(default_factory=dict)
    gaps: tuple[int, ...] = ()
    gap_seconds: float = 0.0
    engines: Mapping[str, Mapping[str, float]] = field(default_factory=dict)


class Tallies:
    """Totals since the process started."""

    def __init__(self) -> None:
        self._counts: dict[Counted, int] = {}
        self._lock = threading.Lock()
        self._gaps = [0] * (len(GAP_SECONDS) + 1)
        self._gap_seconds = 0.0

    def count(self, name: str, *labels: str, n: int = 1) -> None:
        """Add `n` to the counter `name`, a key of COUNTS, with a value for each of its labels. From any thread."""
        with self._lock:
            key = (name, labels)
            self._counts[key] = self._counts.get(key, 0) + n

    def set(self, name: str, *labels: str, total: int) -> None:
        """Set a counter to a total that other code has counted. A total of 0 does not create the counter."""
        if total:
            with self._lock:
                self._counts[name, labels] = total

    def gap(self, seconds: float) -> None:
        """Count the gap between two tokens. From one thread only: every token takes this path, without the lock."""
        self._gaps[bisect_left(GAP_SECONDS, seconds)] += 1
        self._gap_seconds += seconds

    def figures(self) -> ServerFigures:
        """A copy of the totals."""
        with self._lock:
            return ServerFigures(dict(self._counts), tuple(self._gaps), self._gap_seconds)


TALLIES = Tallies()
"""The totals of this process."""
