"""When an engine is started again, and when no more."""

from __future__ import annotations

MOST_SECONDS = 60.0
"""The longest pause."""
WINDOW_SECONDS = 600.0
"""Deaths longer ago than this are forgotten."""


class BackOff:
    """Pauses that double with every death in a window of time, from `first` seconds; after `limit` there is none (0:
    there always is)."""

    def __init__(self, first: float, limit: int) -> None:
        self._first = first
        self._limit = limit
        self._deaths: list[float] = []

    def pause(self, now: float) -> float | None:
        """Seconds to wait after a death at `now`; None: it has died too often."""
        self._deaths = [death for death in self._deaths if now - death < WINDOW_SECONDS] + [now]
        before = len(self._deaths) - 1
        if self._limit and before >= self._limit:
            return None
        return min(self._first * 2.0 ** min(before, 60), MOST_SECONDS)
