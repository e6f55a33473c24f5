"""The largest step that can come: kernels take their room for it, and it is run once, so that what it needs is
measured and not guessed."""

from __future__ import annotations

import time
from collections.abc import Mapping

import numpy as np

from llmcore.api.bridge import LengthDecay, SamplingParams
from llmcore.api.errors import PluginError, reraise_if_stopping
from llmcore.api.protocols import AttentionKernel, AttnLimits, Device, Int32, SchedulerLimits
from llmcore.api.specs import TOKEN_BUCKETS
from llmcore.engine.graphs import CAPTURED_AT
from llmcore.engine.model_runner import ModelRunner
from llmcore.layers.build import AttentionKernels
from llmcore.sched.plan import MIXED_TOKENS, Admitted, StepPlan, TableWrites, frame_of, padded

_GREEDY = SamplingParams(temperature=0.0)
_EVERYTHING = SamplingParams(temperature=1.0, top_k=50, top_p=0.9, typical_p=0.9, repetition_penalty=1.1, logprobs=20)
_STEERED = SamplingParams(logit_bias={0: 1.0}, allowed_ids=(0,), length_decay=LengthDecay(0, 1.1, (0,)))
"""Steps with these are not captured."""
_WAYS = (
    SamplingParams(),
    SamplingParams(top_p=0.9),
    SamplingParams(allowed_ids=(0,)),
    SamplingParams(typical_p=0.9),
)
"""With _EVERYTHING and _STEERED all kernels by which tokens are drawn."""
_LONG = 2 * MIXED_TOKENS
"""Tokens of a step of the last bucket, which is not captured."""
_RATED, _TIMED = 2048, 3
"""Tokens of a step that tells how fast prompts are computed, and how often it runs. The first run warms it up."""


def take_workspaces(groups: Mapping[str, AttentionKernels], limits: SchedulerLimits) -> None:
    """Have every attention kernel take what it needs for the largest step of its token bucket, once.

    Raises PluginError for a kernel that cannot.
    """
    for name, kernels in groups.items():
        for (_, last), *several in zip(TOKEN_BUCKETS, kernels.decode, kernels.prefill, kernels.mixed, strict=True):
            tokens = min(max(limits.batch_tokens, MIXED_TOKENS), last or limits.batch_tokens)
            # padding fills decode steps up to the next size, and mixed ones to a row for every token
            rows = (
                min(padded(limits.max_running), tokens),
                min(limits.max_running, tokens),
                min(MIXED_TOKENS, tokens),
            )
            for kernel, count in zip(several, rows, strict=True):
                _take_workspace(kernel, AttnLimits(rows=count, tokens=tokens, kv_len=limits.max_total_len), name)


def _take_workspace(kernel: AttentionKernel, most: AttnLimits, group: str) -> None:
    try:
        kernel.workspace(most)
    except BaseException as error:
        reraise_if_stopping(error)
        what = f"{type(kernel).__module__}.{type(kernel).__qualname__}"
        raise PluginError(
            f"attention kernel {what} of KV group {group!r} cannot take its workspace for {most}: "
            f"{type(error).__name__}: {error}; pin another with --kernel, or lower --batch_max_tokens"
        ) from error


def run_worst_case(runner: ModelRunner, device: Device, limits: SchedulerLimits, granules: tuple[int, ...]) -> None:
    """Run a step of `batch_tokens` new tokens with as many sampled rows as can be, in the `full` variant.

    Every token's KV goes to the first granule; the tables hold nothing of worth afterwards.
    """
    _run(runner, worst_plan(limits, granules))
    device.synchronize()


def measure(runner: ModelRunner, device: Device, limits: SchedulerLimits, granules: tuple[int, ...]) -> int:
    """Run the largest steps, uncaptured and captured; bytes that the graphs of these take."""
    run_worst_case(runner, device, limits, granules)
    if not runner.graph_rows:
        return 0
    before = device.graph_memory
    for plan in filter(None, (decode_plan(limits, runner.graph_rows), mixed_plan(limits))):
        for _ in range(CAPTURED_AT):
            _run(runner, plan)
    device.synchronize()
    return device.graph_memory - before


def warm_up(runner: ModelRunner, device: Device, limits: SchedulerLimits) -> None:
    """Run a step of every kind and token bucket: what is compiled on first use should not be when requests wait."""
    for plan in warm_plans(limits):
        _run(runner, plan)
    device.synchronize()


def _run(runner: ModelRunner, plan: StepPlan) -> None:
    plan.frame = frame_of(plan, runner.graph_rows)
    runner.read(runner.launch(plan))


def warm_plans(limits: SchedulerLimits) -> list[StepPlan]:
    """Plans per token bucket. The fewest and the most rows that decode, short and long. A prompt, and one behind as
    many cached tokens, each in a step that is captured and in one that is not. A prompt beside a row that decodes.
    Then a row for every way to draw. `scripts/variants.py` tells what is missing.
    """
    plans = []
    long = limits.max_total_len - 1
    for first, last in TOKEN_BUCKETS:
        tokens = min(last or _LONG, limits.batch_tokens)
        rows = np.arange(min(tokens, limits.max_running), dtype=np.int32)
        ones, chunk = np.ones_like(rows), min(tokens, limits.max_input_len)
        # kernels have tiles of powers of two, and work on few rows in more parts
        for some in sorted({min(first, rows.size), rows.size}):
            plans += [_plan(rows[:some], ones[:some], ones[:some] * start, some, _GREEDY) for start in (0, long)]
        half = min(tokens, limits.max_input_len // 2)
        for sampling in (_GREEDY, _STEERED):
            plans += [_prompt(chunk, sampling), *([_prompt(half, sampling, cached=half)] if half else ())]
        if rows.size > 1 and chunk > 2:
            plans.append(
                _plan(rows[:2], np.array([1, chunk - 1], np.int32), np.array([long, 0], np.int32), 1, _GREEDY)
            )
    return [*plans, *(_prompt(1, way) for way in _WAYS)]


def prefill_rate(runner: ModelRunner, device: Device, limits: SchedulerLimits) -> float:
    """Prompt tokens that the device computes in a millisecond: in the fastest of a few steps of prompts alone."""
    plan = prompts_plan(limits)
    spent = []
    for _ in range(_TIMED):
        began = time.perf_counter()
        _run(runner, plan)
        device.synchronize()
        spent.append(time.perf_counter() - began)
    return plan.n_tokens / (min(spent) * 1e3)


def prompts_plan(limits: SchedulerLimits) -> StepPlan:
    """About `_RATED` tokens of prompts, as far as the limits allow."""
    length = min(_RATED, limits.max_input_len, limits.batch_tokens)
    count = min(_RATED // length, limits.batch_tokens // length, limits.max_running)
    rows = np.arange(count, dtype=np.int32)
    return _plan(rows, np.full_like(rows, length), np.zeros_like(rows), 0, _GREEDY)


def _prompt(tokens: int, sampling: SamplingParams, cached: int = 0) -> StepPlan:
    """`tokens` of one row that does not decode, behind `cached` ones."""
    none = np.zeros(1, np.int32)
    return _plan(none, none + np.int32(tokens), none + np.int32(cached), 0, sampling)


def decode_plan(limits: SchedulerLimits, most: int) -> StepPlan | None:
    """As many rows as are captured, each at the end of the longest request; None where none is captured."""
    count = min(limits.max_running, limits.batch_tokens, most)
    rows = np.arange(count, dtype=np.int32)
    long = np.full_like(rows, limits.max_total_len - 1)
    return _plan(rows, np.ones_like(rows), long, count, _EVERYTHING) if count else None


def mixed_plan(limits: SchedulerLimits) -> StepPlan | None:
    """A chunk beside as many decode rows as the largest captured mixed step takes; None if they do not fit."""
    tokens = min(MIXED_TOKENS, limits.batch_tokens)
    chunk = min(tokens // 2, limits.max_input_len)
    decoding = min(tokens - chunk, limits.max_running - 1)
    if chunk < 2 or decoding < 1:
        return None
    n_query = np.ones(decoding + 1, np.int32)
    n_query[-1] = chunk
    start = np.full_like(n_query, limits.max_total_len - 1)
    start[-1] = 0
    return _plan(np.arange(decoding + 1, dtype=np.int32), n_query, start, decoding, _EVERYTHING)


def _plan(rows: Int32, n_query: Int32, start: Int32, n_decode: int, sampling: SamplingParams) -> StepPlan:
    """Every row sampled; KV is read and written at the first granule, as all tables say."""
    return StepPlan(
        number=0,
        request=rows,
        n_query=n_query,
        reserve=n_query,
        start=start,
        want=np.zeros(rows.size, np.uint8),
        n_decode=n_decode,
        sample_row=rows,
        sample_request=rows,
        admitted=[
            Admitted(int(row), np.zeros(1, np.int32), 1, int(at), sampling, 0, 0, ())
            for row, at in zip(rows, start, strict=True)
        ],
    )


def worst_plan(limits: SchedulerLimits, granules: tuple[int, ...]) -> StepPlan:
    """One long prompt as far as it may go, the rest of the budget over as many rows as there are places."""
    longest = min(limits.max_input_len, limits.batch_tokens)
    lengths = np.array(_spread(limits.batch_tokens, limits.max_running, longest), np.int32)
    rows: Int32 = np.arange(lengths.size, dtype=np.int32)
    admitted = [
        Admitted(int(row), np.zeros(length, np.int32), int(length), 0, _EVERYTHING, 0, 0, ())
        for row, length in zip(rows, lengths, strict=True)
    ]
    return StepPlan(
        number=0,
        request=rows,
        n_query=lengths,
        reserve=lengths,
        start=np.zeros_like(rows),
        want=np.zeros(rows.size, np.uint8),
        n_decode=0,
        sample_row=rows,
        sample_request=rows,
        admitted=admitted,
        writes=[_places(rows, -(-lengths // granule)) for granule in granules],
    )


def _spread(tokens: int, rows: int, longest: int) -> list[int]:
    """At most `rows` lengths of at most `longest`, that sum to `tokens` if they can: short ones first."""
    rows = min(rows, tokens)
    lengths = [1] * rows
    left = tokens - rows
    for row in range(rows - 1, -1, -1):
        more = min(left, longest - 1)
        lengths[row] += more
        left -= more
    return lengths


def _places(rows: Int32, counts: Int32) -> TableWrites:
    """The first granule, `counts` times for each row."""
    at = np.concatenate([np.arange(count, dtype=np.int32) for count in counts])
    return TableWrites(np.repeat(rows, counts).astype(np.int32), at, np.zeros(at.size, np.int32))
