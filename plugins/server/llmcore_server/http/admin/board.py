"""What the admin listener knows: the supervisor's newest word, the last minutes, and who waits for a step."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import orjson

from llmcore_server.http.admin.history import History
from llmcore_server.http.reply import Reply
from llmcore_server.server_status import Overview

SILENCE_SECONDS = 10.0
"""A supervisor that said nothing for this long is not alive, once it has spoken."""

PROBE_SECONDS = 2.0
"""How long `/ready` waits for the step that it had an idle engine do."""


@dataclass(frozen=True)
class Verdict:
    """`age`: seconds since the newest finished step, None before the first. `idle`: it is too old, because nothing
    runs: only a step can tell."""

    ready: bool
    reason: str = ""
    age: float | None = None
    idle: bool = False

    @property
    def status(self) -> int:
        """Of the answer."""
        return 200 if self.ready else 503

    @property
    def body(self) -> bytes:
        """Of the answer."""
        said: dict[str, object] = {"status": "ok"} if self.ready else {"status": "error", "reason": self.reason}
        return orjson.dumps({**said, "last_step_seconds": None if self.age is None else round(self.age, 3)})


class Board:
    """For any thread; `heard` and `tick` are the hub's. `probe` asks the engine for a step."""

    def __init__(self, timeout: float, probe: Callable[[], None]) -> None:
        self._timeout = timeout
        self._probe = probe
        self._lock = threading.Lock()
        self._waiting: list[tuple[Reply, float]] = []
        self._heard = 0.0
        self.overview: Overview | None = None
        self.history = History()

    def heard(self, overview: Overview) -> None:
        """The supervisor spoke."""
        now = time.monotonic()
        self.overview, self._heard = overview, now
        self.history.add(overview, now, time.time())

    def tick(self) -> None:
        """Answer those whose step has come, or who have waited for too long."""
        if not self._waiting:
            return
        verdict, now = self.verdict(), time.monotonic()
        with self._lock:
            over = [reply for reply, until in self._waiting if not verdict.idle or now > until]
            self._waiting = [(reply, until) for reply, until in self._waiting if reply not in over]
        for reply in over:
            reply.respond(verdict.status, verdict.body)

    @property
    def awaited(self) -> bool:
        """Whether somebody waits for a step."""
        return bool(self._waiting)

    @property
    def silent(self) -> bool:
        """Whether the supervisor should have been heard of long since."""
        return self.overview is not None and time.monotonic() - self._heard > SILENCE_SECONDS

    def verdict(self) -> Verdict:
        """Whether requests can be served: a step has finished lately and nothing else speaks against it."""
        overview = self.overview
        if overview is None:
            return Verdict(False, "the server is starting")
        age = time.monotonic() - overview.stepped if overview.stepped else None
        if self.silent:
            return Verdict(False, "the supervisor does not answer", age)
        if overview.reason:
            return Verdict(False, overview.reason, age)
        if age is not None and age <= self._timeout:
            return Verdict(True, "", age)
        if overview.load.running or overview.load.waiting:
            return Verdict(False, f"requests wait, and no step has finished for {self._timeout:g} s", age)
        return Verdict(False, f"a step was tried, and has not finished within {PROBE_SECONDS:g} s", age, idle=True)

    def await_step(self, reply: Reply) -> None:
        """Answer `reply` when the engine has done a step, or has failed to."""
        with self._lock:
            self._waiting.append((reply, time.monotonic() + PROBE_SECONDS))
        self._probe()
