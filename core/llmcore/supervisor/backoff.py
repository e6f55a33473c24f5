"""How long to wait before an engine is started again."""

from __future__ import annotations

FIRST_SECONDS = 1.0
MOST_SECONDS = 60.0
STEADY_SECONDS = 300.0
"""An engine that served for this long had recovered; the next pause is the first again."""


class BackOff:
    """Pauses that double with every death in a row."""

    def __init__(self) -> None:
        self._pause = FIRST_SECONDS
        self._since: float | None = None

    def served(self, now: float) -> None:
        """The engine is ready."""
        self._since = now

    def pause(self, now: float) -> float:
        """Seconds to wait after a death at `now`."""
        if self._since is not None and now - self._since >= STEADY_SECONDS:
            self._pause = FIRST_SECONDS
        self._since = None
        pause, self._pause = self._pause, min(2 * self._pause, MOST_SECONDS)
        return pause
