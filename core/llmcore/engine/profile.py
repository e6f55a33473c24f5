"""The largest step that can come: kernels take their room for it, and it is run once, so that what it needs is
measured and not guessed."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import numpy as np

from llmcore.api.bridge import LengthDecay, SamplingParams
from llmcore.api.errors import PluginError, reraise_if_stopping
from llmcore.api.protocols import AttentionKernel, AttnLimits, Device, Int32, SchedulerLimits
from llmcore.api.specs import TOKEN_BUCKETS
from llmcore.engine.graphs import CAPTURED_AT
from llmcore.engine.leader import Runner
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


def run_worst_case(runner: Runner, device: Device, limits: SchedulerLimits, granules: tuple[int, ...]) -> None:
    """Run a step of `batch_tokens` new tokens with as many sampled rows as can be, in the `full` variant.

    Every token's KV goes to the first granule; the tables hold nothing of worth afterwards.
    """
    _run(runner, device, [worst_plan(limits, granules)])


def measure(runner: Runner, device: Device, limits: SchedulerLimits, granules: tuple[int, ...]) -> int:
    """Run the largest steps, uncaptured and captured; bytes that the graphs of these take."""
    run_worst_case(runner, device, limits, granules)
    if not runner.graph_rows:
        return 0
    before = device.graph_memory
    largest = (decode_plan(limits, runner.graph_rows), mixed_plan(limits))
    _run(runner, device, [plan for plan in largest if plan is not None for _ in range(CAPTURED_AT)])
    return device.graph_memory - before


def warm_up(runner: Runner, device: Device, limits: SchedulerLimits) -> None:
    """Run a step of every kind and token bucket: what is compiled on first use should not be when requests wait."""
    _run(runner, device, warm_plans(limits))


def tokens_within(stall: float, runner: Runner, device: Device, limits: SchedulerLimits) -> tuple[int, str]:
    """Prompt tokens that make a step about `stall` ms longer than one without prompts, and a line that says so.

    A small step takes as long as the device reads the weights. So prompts have that time, too.
    """
    prompts = prompts_plan(limits)
    rate = prompts.n_tokens / _fastest(runner, device, prompts, _TIMED)
    alone = _fastest(runner, device, _plan([1], [0], _GREEDY, n_decode=1), CAPTURED_AT + _TIMED)
    tokens = max(int((stall + alone) * rate), 1)
    return tokens, (
        f"{tokens:,} tokens of a step beside answers ({stall:g} ms more than the {alone:.1f} ms of a step without "
        f"prompts, at {rate * 1e3:,.0f} tokens/s)"
    )


def _fastest(runner: Runner, device: Device, plan: StepPlan, times: int) -> float:
    """Milliseconds of the fastest of several runs of a step."""
    spent = []
    for _ in range(times):
        began = time.perf_counter()
        _run(runner, device, [plan])
        spent.append(time.perf_counter() - began)
    return min(spent) * 1e3


def _run(runner: Runner, device: Device, plans: Sequence[StepPlan]) -> None:
    for plan in plans:
        plan.frame = frame_of(plan, runner.graph_rows)
        runner.read(runner.enqueue(runner.prepare(plan)))
    device.synchronize()


def warm_plans(limits: SchedulerLimits) -> list[StepPlan]:
    """Plans per token bucket. The fewest and the most rows that decode, short and long. A prompt, and one behind as
    many cached tokens, each in a step that is captured and in one that is not. A prompt beside a row that decodes.
    Then a row for every way to draw. `scripts/variants.py` tells what is missing.
    """
    plans = []
    long = limits.max_total_len - 1
    for first, last in TOKEN_BUCKETS:
        tokens = min(last or _LONG, limits.batch_tokens)
        rows, chunk = min(tokens, limits.max_running), min(tokens, limits.max_input_len)
        # kernels have tiles of powers of two, and work on few rows in more parts
        for some in sorted({min(first, rows), rows}):
            plans += [_plan([1] * some, [start] * some, _GREEDY, n_decode=some) for start in (0, long)]
        half = min(tokens, limits.max_input_len // 2)
        for sampling in (_GREEDY, _STEERED):
            plans += [_plan([chunk], [0], sampling), *([_plan([half], [half], sampling)] if half else ())]
        if rows > 1 and chunk > 2:
            plans.append(_plan([1, chunk - 1], [long, 0], _GREEDY, n_decode=1))
    return [*plans, *(_plan([1], [0], way) for way in _WAYS)]


def prompts_plan(limits: SchedulerLimits) -> StepPlan:
    """About `_RATED` tokens of prompts, as far as the limits allow."""
    length = min(_RATED, limits.max_input_len, limits.batch_tokens)
    count = min(_RATED // length, limits.batch_tokens // length, limits.max_running)
    return _plan([length] * count, [0] * count, _GREEDY)


def decode_plan(limits: SchedulerLimits, most: int) -> StepPlan | None:
    """As many rows as are captured, each at the end of the longest request; None where none is captured."""
    count = min(limits.max_running, limits.batch_tokens, most)
    return _plan([1] * count, [limits.max_total_len - 1] * count, _EVERYTHING, n_decode=count) if count else None


def mixed_plan(limits: SchedulerLimits) -> StepPlan | None:
    """A chunk beside as many decode rows as the largest captured mixed step takes; None if they do not fit."""
    tokens = min(MIXED_TOKENS, limits.batch_tokens)
    chunk = min(tokens // 2, limits.max_input_len)
    decoding = min(tokens - chunk, limits.max_running - 1)
    if chunk < 2 or decoding < 1:
        return None
    long = [limits.max_total_len - 1] * decoding
    return _plan([1] * decoding + [chunk], [*long, 0], _EVERYTHING, n_decode=decoding)


def worst_plan(limits: SchedulerLimits, granules: tuple[int, ...]) -> StepPlan:
    """One long prompt as far as it may go, the rest of the budget over as many rows as there are places."""
    lengths = _spread(limits.batch_tokens, limits.max_running, min(limits.max_input_len, limits.batch_tokens))
    plan = _plan(lengths, [0] * len(lengths), _EVERYTHING)
    plan.writes = [_places(plan.request, -(-plan.n_query // granule)) for granule in granules]
    return plan


def _plan(n_query: Sequence[int], start: Sequence[int], sampling: SamplingParams, n_decode: int = 0) -> StepPlan:
    """Every row sampled; KV is read and written at the first granule, as all tables say."""
    rows, new = np.arange(len(n_query), dtype=np.int32), np.array(n_query, np.int32)
    return StepPlan(
        number=0,
        request=rows,
        n_query=new,
        reserve=new,
        start=np.array(start, np.int32),
        want=np.zeros(rows.size, np.uint8),
        n_decode=n_decode,
        sample_row=rows,
        sample_request=rows,
        admitted=[
            Admitted(row, np.zeros(length, np.int32), length, at, sampling, 0, 0, ())
            for row, (length, at) in enumerate(zip(n_query, start, strict=True))
        ],
    )


def _spread(tokens: int, rows: int, longest: int) -> list[int]:
    """At most `rows` lengths of at most `longest`, that sum to `tokens` if they can: short ones first."""
    rows = min(rows, tokens)
    # beside one token for each row: what the last row has, the last two have, ... and all
    more = np.minimum(np.arange(rows + 1) * (longest - 1), tokens - rows)
    lengths: list[int] = (1 + np.diff(more))[::-1].tolist()
    return lengths


def _places(rows: Int32, counts: Int32) -> TableWrites:
    """The first granule, `counts` times for each row."""
    at = np.concatenate([np.arange(count, dtype=np.int32) for count in counts])
    return TableWrites(np.repeat(rows, counts).astype(np.int32), at, np.zeros(at.size, np.int32))
