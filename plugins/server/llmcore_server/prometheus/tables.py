"""Every metric: its name, what it is, and where it comes from. docs/metrics.md is made of these tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from llmcore.api import COUNTS, RequestRecord

PREFIX = "llmcore_"

SECONDS = tuple(0.001 * 1.5**i for i in range(1, 36))
"""1.5 ms to 24 minutes, as LightLLM has them."""
TOKENS = tuple(float(1 << i) for i in range(18))
SHARES = tuple(i / 10 for i in range(11))

COUNTERS = {
    "request_count": "Requests that were taken in and have ended.",
    "request_success": "Requests that ended with a whole answer: at a stop, or at their length.",
    "request_failure": "Requests that ended with an error.",
    "request_abort": "Requests whose client left first.",
}

ENDED = "request_ended"
ENDED_HELP = "Requests by how they ended (stop, length, abort, error) and, for the last two, why."


def per_token(record: RequestRecord) -> float | None:
    """Seconds per token of an answer after its first (TPOT)."""
    if record.first_token is None or record.output_tokens < 2:
        return None
    return (record.duration - record.first_token) / (record.output_tokens - 1)


HISTOGRAMS: Mapping[str, tuple[str, tuple[float, ...], Callable[[RequestRecord], float | None]]] = {
    "request_inference_duration": ("Seconds from a request's arrival to its end.", SECONDS, lambda r: r.duration),
    "request_first_token_duration": (
        "Seconds from a request's arrival to its first token (TTFT).",
        SECONDS,
        lambda r: r.first_token,
    ),
    "request_mean_time_per_token_duration": (
        "Seconds per token of an answer, after its first (TPOT).",
        SECONDS,
        per_token,
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

GAPS = "inter_token_duration"
GAPS_HELP = (
    "Seconds between two tokens of an answer as they reach the HTTP worker (ITL); tokens that come together once."
)

GAUGES = {
    "queue_size": ("waiting", "Requests that wait to be admitted."),
    "queue_tokens": ("waiting_tokens", "Prompt tokens of the requests that wait."),
    "batch_current_size": ("running", "Requests that run."),
    "batch_current_max_tokens": ("peak", "KV slots that the running requests are foreseen to need at most."),
    "kv_live": ("kv_live", "KV slots that requests hold, in tokens."),
    "kv_cached": ("kv_cached", "KV slots that only the prefix cache holds, in tokens."),
    "kv_free": ("kv_free", "KV slots that nobody holds, in tokens."),
    "kv_total": ("kv_total", "All KV slots, in tokens."),
    "kv_usage": ("kv_usage", "Share of KV slots that requests hold, from 0 to 1."),
    "graphs_captured": ("graphs", "Steps that are captured and replayed as a whole."),
    "engine_figures_timestamp_seconds": ("taken", "When the engine took its figures, as Unix time."),
}
"""Name -> (figure of bridge.Load, help)."""

TOTALS = {
    "engine_steps": ("steps", "Steps the engine has finished."),
    "prompt_tokens": ("prompt_tokens", "Prompt tokens of admitted requests."),
    "prefix_hit_tokens": ("cached_tokens", "Prompt tokens that came from the prefix cache."),
    "generated_tokens": ("output_tokens", "Tokens generated."),
    "preemptions": ("preemptions", "Requests taken out for want of slots, to be recomputed."),
    "failed_steps": ("failed_steps", "Steps that failed; their requests were tried again one at a time."),
    "failed_choices": ("failed_requests", "Choices that ended because the model or a plugin failed on them."),
    "aborts": ("aborts", "Requests the engine ended because their client left."),
}
"""Name -> (field of bridge.Load that only grows, help)."""

ENGINE_GAUGES = {
    "engine_up": ("up", "1 while requests can be sent to this one of several engines, else 0."),
    "engine_queue_size": ("waiting", "Requests that wait at this one of several engines."),
    "engine_batch_current_size": ("running", "Requests that run at this one of several engines."),
    "engine_kv_usage": ("kv_usage", "Share of KV slots that requests hold at this one of several engines."),
}
"""The gauges of each engine, where there are several: name -> (figure, help)."""

ENGINE_TOTALS = {
    "engine_prompt_tokens": ("prompt_tokens", "Prompt tokens of requests that this one of several engines admitted."),
    "engine_prefix_hit_tokens": ("cached_tokens", "Those that came from the prefix cache."),
    "engine_generated_tokens": ("output_tokens", "Tokens that this one of several engines generated."),
    "engine_preemptions": ("preemptions", "Requests that this one of several engines took out for want of slots."),
}
"""Its totals, which begin anew with another engine: name -> (figure, help)."""

CACHE_CONFIG = "cache_config_info"
CACHE_CONFIG_HELP = "The KV cache: tokens of a block, and blocks. The value is 1."
CACHE_CONFIG_LABELS = ("block_size", "num_gpu_blocks")
"""Their names are vLLM's, which endpoint pickers look for."""

CACHE = "prefix_cache"
CACHE_HELP = "What the prefix cache says of itself, by name."


class Metric(NamedTuple):
    """One family as `/metrics` shows it; a counter's samples end in `_total`, which `name` has."""

    name: str
    kind: str
    labels: tuple[str, ...]
    help: str


def metrics() -> Iterator[Metric]:
    """All of them, by name without the prefix."""
    for name, (_, text) in GAUGES.items():
        yield Metric(f"{PREFIX}{name}", "gauge", (), text)
    yield Metric(f"{PREFIX}{CACHE_CONFIG}", "gauge", CACHE_CONFIG_LABELS, CACHE_CONFIG_HELP)
    yield Metric(f"{PREFIX}{CACHE}", "gauge", ("figure",), CACHE_HELP)
    for name, text in COUNTERS.items():
        yield Metric(f"{PREFIX}{name}_total", "counter", (), text)
    yield Metric(f"{PREFIX}{ENDED}_total", "counter", ("finish", "cause"), ENDED_HELP)
    for name, (_, text) in TOTALS.items():
        yield Metric(f"{PREFIX}{name}_total", "counter", (), text)
    for name, (labels, text) in COUNTS.items():
        yield Metric(f"{PREFIX}{name}_total", "counter", labels, text)
    for name, (_, text) in ENGINE_GAUGES.items():
        yield Metric(f"{PREFIX}{name}", "gauge", ("engine",), text)
    for name, (_, text) in ENGINE_TOTALS.items():
        yield Metric(f"{PREFIX}{name}_total", "counter", ("engine",), text)
    for name, (text, _, _) in HISTOGRAMS.items():
        yield Metric(f"{PREFIX}{name}", "histogram", (), text)
    yield Metric(f"{PREFIX}{GAPS}", "histogram", (), GAPS_HELP)
