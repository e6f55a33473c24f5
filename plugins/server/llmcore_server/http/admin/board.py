"""The data of the admin listener: the supervisor's newest message, the last minutes, and the requests that wait for a
step.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
import orjson
from llmcore.api.counters import GAP_SECONDS

from llmcore_server.http.reply import Reply
from llmcore_server.messages import EngineStatus
from llmcore_server.server_status import Overview

KEPT = 600
"""Samples."""
STEP_SECONDS = 1.0
WINDOW = 15
"""Samples over which percentiles and the prefix-hit rate are taken."""


class Sample(msgspec.Struct, frozen=True):
    """One second. `time`: time.time(). Rates are per second; latencies are seconds, None where there were none.

    `hit`: share of the prompt tokens of the last WINDOW seconds that came from the prefix cache, None without prompts.
    """

    time: float
    output_rate: float
    prompt_rate: float
    finish_rate: float
    fail_rate: float
    hit: float | None
    running: int
    waiting: int
    kv_live: int
    kv_cached: int
    kv_free: int
    first_token: tuple[float | None, float | None, float | None]
    between: tuple[float | None, float | None, float | None]


QUANTILES = (0.5, 0.9, 0.99)
"""Of `Sample.first_token` and `Sample.between`."""


class History:
    """Samples, made from the supervisor's messages. For one writer; readers get copies."""

    def __init__(self) -> None:
        self._samples: deque[Sample] = deque(maxlen=KEPT)
        self._raw: deque[tuple[float, Overview]] = deque(maxlen=WINDOW + 1)

    def add(self, overview: Overview, now: float, wall: float) -> None:
        """`overview` came at `now` (time.monotonic()), which is `wall` (time.time())."""
        if self._raw and now - self._raw[-1][0] < STEP_SECONDS * 0.9:
            return
        if self._raw and overview.load.steps < self._raw[-1][1].load.steps:
            self._raw.clear()  # another engine: its totals begin anew
        if self._raw:
            self._samples.append(_sample(self._raw, overview, now, wall))
        self._raw.append((now, overview))

    def since(self, wall: float) -> list[Sample]:
        """Samples after `wall`, oldest first."""
        return [sample for sample in list(self._samples) if sample.time > wall]


def _sample(raw: deque[tuple[float, Overview]], new: Overview, now: float, wall: float) -> Sample:
    (then, last), first = raw[-1], raw[0][1]
    seconds, load = now - then, new.load
    prompt = load.prompt_tokens - first.load.prompt_tokens
    failed = new.ended.get("error", 0) - last.ended.get("error", 0)
    return Sample(
        time=wall,
        output_rate=(load.output_tokens - last.load.output_tokens) / seconds,
        prompt_rate=(load.prompt_tokens - last.load.prompt_tokens) / seconds,
        finish_rate=(sum(new.ended.values()) - sum(last.ended.values())) / seconds,
        fail_rate=failed / seconds,
        hit=(load.cached_tokens - first.load.cached_tokens) / prompt if prompt > 0 else None,
        running=load.running,
        waiting=load.waiting,
        kv_live=load.kv_live,
        kv_cached=load.kv_cached,
        kv_free=load.kv_free,
        first_token=_quantiles(new.first_tokens, first.first_tokens),
        between=_quantiles(new.gaps, first.gaps),
    )


def _quantiles(new: Sequence[int], old: Sequence[int]) -> tuple[float | None, float | None, float | None]:
    counts = [a - b for a, b in zip(new, old, strict=True)] if old else list(new)
    low, middle, high = (quantile(counts, q) for q in QUANTILES)
    return low, middle, high


def quantile(counts: Sequence[int], q: float) -> float | None:
    """The `q`-quantile of values that were counted by bucket of GAP_SECONDS, by share within a bucket; None of none.

    Values beyond the last end count as the last end.
    """
    rank = q * sum(counts)
    if not rank:
        return None
    below = 0.0
    ends = (0.0, *GAP_SECONDS, GAP_SECONDS[-1])
    for i, n in enumerate(counts):
        if n and below + n >= rank:
            return ends[i] + (ends[i + 1] - ends[i]) * (rank - below) / n
        below += n
    return ends[-1]


SILENCE_SECONDS = 10.0
"""A supervisor that has spoken and then says nothing for this time is not alive."""

PROBE_SECONDS = 2.0
"""The most seconds that `/ready` waits for the step that an idle engine was asked to do."""


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
        """The status of the answer."""
        return 200 if self.ready else 503

    @property
    def body(self) -> bytes:
        """The body of the answer."""
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
        """Take the supervisor's newest message."""
        now = time.monotonic()
        self.overview, self._heard = overview, now
        self.history.add(overview, now, time.time())

    def tick(self) -> None:
        """Answer the requests whose step has finished, or that have waited too long."""
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
        """True if a request waits for a step."""
        return bool(self._waiting)

    @property
    def silent(self) -> bool:
        """True if the supervisor has been silent for too long."""
        return self.overview is not None and time.monotonic() - self._heard > SILENCE_SECONDS

    def verdict(self) -> Verdict:
        """The verdict on readiness: an engine has finished a step lately, and no other reason forbids it."""
        overview = self.overview
        if overview is None:
            return Verdict(False, "the server is starting")
        stepped = max(engine.stepped for engine in overview.engines)
        age = time.monotonic() - stepped if stepped else None
        if self.silent:
            return Verdict(False, "the supervisor does not answer", age)
        if overview.reason:
            return Verdict(False, overview.reason, age)
        verdicts = [self._verdict(engine) for engine in overview.engines if engine.serves]
        none = Verdict(False, "no engine serves", age)
        return max(verdicts, key=lambda verdict: (verdict.ready, verdict.idle), default=none)

    def _verdict(self, engine: EngineStatus) -> Verdict:
        """The verdict on an engine that serves."""
        age = time.monotonic() - engine.stepped if engine.stepped else None
        if age is not None and age <= self._timeout:
            return Verdict(True, "", age)
        if engine.load.running or engine.load.waiting:
            return Verdict(False, f"requests wait, and no step has finished for {self._timeout:g} s", age)
        return Verdict(False, f"a step was tried, and has not finished within {PROBE_SECONDS:g} s", age, idle=True)

    def await_step(self, reply: Reply) -> None:
        """Answer `reply` when the engine has done a step, or has failed to do one."""
        with self._lock:
            self._waiting.append((reply, time.monotonic() + PROBE_SECONDS))
        self._probe()
