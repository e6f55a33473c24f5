"""The largest step that can come: kernels take their room for it, and it is run once, so that what it needs is
measured and not guessed."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from llmcore.bridge import SamplingParams
from llmcore.engine.runner import Runner
from llmcore.errors import PluginError
from llmcore.layers.build import AttentionKernels
from llmcore.protocols import AttentionKernel, AttnLimits, Device, Int32, SchedulerLimits
from llmcore.sched.plan import Admitted, StepPlan, TableWrites
from llmcore.specs import TOKEN_BUCKETS

_EVERYTHING = SamplingParams(temperature=1.0, top_k=50, top_p=0.9, repetition_penalty=1.1, logprobs=20)


def take_workspaces(groups: Mapping[str, AttentionKernels], limits: SchedulerLimits) -> None:
    """Have every attention kernel take what it needs for the largest step of its token bucket, once.

    Raises PluginError for a kernel that cannot.
    """
    for name, kernels in groups.items():
        for pair in zip(TOKEN_BUCKETS, kernels.decode, kernels.prefill, strict=True):
            (_, last), *both = pair
            tokens = min(limits.batch_tokens, last or limits.batch_tokens)
            most = AttnLimits(rows=min(limits.max_running, tokens), tokens=tokens, kv_len=limits.max_total_len)
            for kernel in both:
                _take_workspace(kernel, most, name)


def _take_workspace(kernel: AttentionKernel, most: AttnLimits, group: str) -> None:
    try:
        kernel.workspace(most)
    except Exception as error:
        what = f"{type(kernel).__module__}.{type(kernel).__qualname__}"
        raise PluginError(
            f"attention kernel {what} of KV group {group!r} cannot take its workspace for {most}: "
            f"{type(error).__name__}: {error}; pin another with --kernel, or lower --batch_max_tokens"
        ) from error


def run_worst_case(runner: Runner, device: Device, limits: SchedulerLimits, granules: tuple[int, ...]) -> None:
    """Run a step of `batch_tokens` new tokens with as many sampled rows as can be, in the `full` variant.

    Every token's KV goes to the first granule; the tables hold nothing of worth afterwards.
    """
    runner.read(runner.launch(worst_plan(limits, granules)))
    device.synchronize()


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
