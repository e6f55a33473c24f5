"""LightLLM's metrics under llmcore's name, and what its slots, cache and preemptions add."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from llmcore.api import RequestRecord

SECONDS = tuple(0.001 * 1.5**i for i in range(1, 36))
"""1.5 ms to 24 minutes, as LightLLM has them."""
TOKENS = tuple(float(1 << i) for i in range(18))
SHARES = tuple(i / 10 for i in range(11))

_COUNTERS = {
    "request_count": "Requests that were taken in.",
    "request_success": "Requests that ended with a whole answer: at a stop, or at their length.",
    "request_failure": "Requests that ended with an error.",
    "request_abort": "Requests whose client left first.",
}

_HISTOGRAMS: Mapping[str, tuple[str, tuple[float, ...], Callable[[RequestRecord], float | None]]] = {
    "request_inference_duration": ("Seconds from a request's arrival to its end.", SECONDS, lambda r: r.duration),
    "request_first_token_duration": (
        "Seconds from a request's arrival to its first token.",
        SECONDS,
        lambda r: r.first_token,
    ),
    "request_mean_time_per_token_duration": (
        "Seconds per token of an answer, after its first.",
        SECONDS,
        lambda r: _per_token(r),
    ),
    "request_input_length": ("Tokens of a request's prompt.", TOKENS, lambda r: r.prompt_tokens),
    "request_generated_tokens": ("Tokens a request generated.", TOKENS, lambda r: r.output_tokens),
    "request_max_new_tokens": ("Tokens a request asked for at most.", TOKENS, lambda r: r.max_new_tokens),
    "cache_length": ("Tokens of a prompt that came from the prefix cache.", TOKENS, lambda r: r.cached_tokens),
    "cache_ratio": (
        "Share of a prompt that came from the prefix cache.",
        SHARES,
        lambda r: r.cached_tokens / r.prompt_tokens if r.prompt_tokens else None,
    ),
}
"""Name -> (help, buckets, what to observe of a request; None: nothing)."""

_GAUGES = {
    "queue_size": ("waiting", "Requests that wait to be admitted."),
    "batch_current_size": ("running", "Requests that run."),
    "batch_current_max_tokens": ("peak", "KV slots that the running requests are foreseen to need at most."),
    "kv_live": ("kv_live", "KV slots that requests hold, in tokens."),
    "kv_cached": ("kv_cached", "KV slots that only the prefix cache holds, in tokens."),
    "kv_free": ("kv_free", "KV slots that nobody holds, in tokens."),
    "kv_total": ("kv_total", "All KV slots, in tokens."),
}
"""Name -> (field of bridge.Load, help)."""

_TOTALS = {
    "engine_steps": ("steps", "Steps the engine has finished."),
    "prompt_tokens": ("prompt_tokens", "Prompt tokens of admitted requests."),
    "prefix_hit_tokens": ("cached_tokens", "Prompt tokens that came from the prefix cache."),
    "generated_tokens": ("output_tokens", "Tokens generated."),
    "preemptions": ("preemptions", "Requests taken out for want of slots, to be recomputed."),
    "aborts": ("aborts", "Requests the engine ended because their client left."),
}
"""Name -> (field of bridge.Load that only grows, help)."""

_CACHE = "cache_"
"""How the prefix cache's own figures begin."""

_OUTCOMES = {"stop": "request_success", "length": "request_success", "abort": "request_abort"}


class PrometheusSink:
    """protocols.MetricSink. Counters get Prometheus' `_total` at the end of their names."""

    def __init__(self) -> None:
        # Else every metric has a second series that says when it was made.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self._registry = CollectorRegistry()
        self._counters = {n: Counter(f"llmcore_{n}", text, registry=self._registry) for n, text in _COUNTERS.items()}
        self._histograms = {
            n: (Histogram(f"llmcore_{n}", text, buckets=buckets, registry=self._registry), observe)
            for n, (text, buckets, observe) in _HISTOGRAMS.items()
        }
        self._gauges = {f: Gauge(f"llmcore_{n}", text, registry=self._registry) for n, (f, text) in _GAUGES.items()}
        self._totals = {f: Counter(f"llmcore_{n}", text, registry=self._registry) for n, (f, text) in _TOTALS.items()}
        text = "What the prefix cache says of itself, by name."
        self._cache = Gauge("llmcore_prefix_cache", text, ["figure"], registry=self._registry)
        self._before: dict[str, float] = {}

    def request_finished(self, record: RequestRecord) -> None:
        """Count a request and observe its lengths and times; those of failed ones say nothing and are left out."""
        self._counters["request_count"].inc()
        outcome = _OUTCOMES.get(record.finish, "request_failure")
        self._counters[outcome].inc()
        if outcome == "request_failure":
            return
        for histogram, observe in self._histograms.values():
            value = observe(record)
            if value is not None:
                histogram.observe(value)

    def snapshot(self, values: Mapping[str, float]) -> None:
        """Take over the engine's figures."""
        for field, gauge in self._gauges.items():
            gauge.set(values[field])
        for field, counter in self._totals.items():
            counter.inc(max(0.0, values[field] - self._before.get(field, 0.0)))
            self._before[field] = values[field]
        for field in (name for name in values if name.startswith(_CACHE)):
            self._cache.labels(field.removeprefix(_CACHE)).set(values[field])

    def page(self) -> tuple[str, bytes]:
        """Prometheus' text format."""
        return CONTENT_TYPE_LATEST, generate_latest(self._registry)


def _per_token(record: RequestRecord) -> float | None:
    if record.first_token is None or record.output_tokens < 2:
        return None
    return (record.duration - record.first_token) / (record.output_tokens - 1)
