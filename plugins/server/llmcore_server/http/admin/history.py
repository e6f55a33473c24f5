"""The last minutes in figures, one sample a second: what the dashboard draws."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import msgspec
from llmcore.api.counters import GAP_SECONDS

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
    """Samples made of what the supervisor says. For one writer; readers get copies."""

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
    """The `q`-quantile of what was counted by bucket of GAP_SECONDS, between a bucket's ends by share; None of none.

    What lies beyond the last end counts as that.
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
