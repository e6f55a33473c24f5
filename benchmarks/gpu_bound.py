"""Lower bounds of gpu.py's rows: steps of nothing but linears, attention over prompts, and KV reads.

Linears are cuBLAS's, attention is cuDNN's or flash attention, and KV is read at copy bandwidth. Each runs long enough
that the GPU's power limit acts. A short probe ends before that, so its result is not a ceiling for a load of seconds.
Norms, rope, sampling and the host are left out. So nothing that uses these linears can be faster. (At a few row counts
our own linears are faster than cuBLAS's.)
"""

from __future__ import annotations

import bisect
import json
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch
import torch.nn.functional as F
from gpu_ceilings import copy
from gpu_rows import Bench, Row
from llmcore.sched.plan import StepPlan
from llmcore_devtools.bench.engine_runs import BenchEngine
from llmcore_devtools.bench.workloads import Lengths
from torch.nn.attention import SDPBackend, sdpa_kernel

TOKENS = (1, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
SAMPLES = (1, 64, 256, 1024)
SECONDS = 1.0
LAYERS = 8
"""Layers whose weights a probe reads in turn: more than any cache holds, and less than a model."""

BYTES = 2


@dataclass(frozen=True)
class Shape:
    """A dense model's sizes."""

    layers: int
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    size: int
    vocabulary: int

    @classmethod
    def of(cls, folder: Path) -> Shape | None:
        """Reads a config.json. Returns None for a mixture or latent attention."""
        config = json.loads((folder / "config.json").read_text())
        if "kv_lora_rank" in config or any("expert" in name for name in config):
            return None
        heads, hidden = config["num_attention_heads"], config["hidden_size"]
        return cls(
            layers=config["num_hidden_layers"],
            hidden=hidden,
            inner=config["intermediate_size"],
            heads=heads,
            kv_heads=config.get("num_key_value_heads", heads),
            size=config.get("head_dim") or hidden // heads,
            vocabulary=config["vocab_size"],
        )

    @property
    def linears(self) -> tuple[tuple[int, int], ...]:
        """Returns (in, out) of the linears of one layer."""
        q, kv = self.heads * self.size, self.kv_heads * self.size
        return (self.hidden, q + 2 * kv), (q, self.hidden), (self.hidden, 2 * self.inner), (self.inner, self.hidden)

    @property
    def kv_bytes(self) -> int:
        """Returns the KV bytes of one token in all layers."""
        return 2 * self.layers * self.kv_heads * self.size * BYTES


@dataclass(frozen=True)
class Sustained:
    """The times and rates that this GPU sustains: seconds of all layers' linears by tokens, of the head by rows, two
    rates."""

    shape: Shape
    linears: tuple[tuple[int, float], ...]
    head: tuple[tuple[int, float], ...]
    copy: float
    attention: float

    def lines(self) -> list[str]:
        """Returns text for people."""
        tflop = 2 * self.shape.layers * sum(x * y for x, y in self.shape.linears) / 1e12
        fast = ", ".join(f"{n}: {s * 1e3:.3f} ms ({tflop * n / s:,.0f} TFLOP/s)" for n, s in self.linears)
        head = ", ".join(f"{n}: {s * 1e3:.3f} ms" for n, s in self.head)
        return [
            f"kept up for {SECONDS:g} s each: linears of {self.shape.layers} layers by tokens: {fast}",
            f"head by rows: {head}; copy {self.copy / 1e12:.2f} TB/s, "
            f"attention over prompts {self.attention / 1e12:,.0f} TFLOP/s",
        ]

    def seconds(self, steps: Iterable[Step]) -> float:
        """Returns the least seconds that these steps take."""
        flops = 2 * 2 * self.shape.layers * self.shape.heads * self.shape.size
        return sum(
            between(self.linears, step.prompt + step.rows)
            + between(self.head, step.samples)
            + step.kv * self.shape.kv_bytes / self.copy
            + step.pairs * flops / self.attention
            for step in steps
        )


@torch.inference_mode()
def sustained(shape: Shape) -> Sustained:
    """Measures for about 20 s, and frees its memory. Without a GPU the figures are made up, to try the script."""
    if not torch.cuda.is_available():
        return Sustained(shape, ((1, 1e-3),), ((1, 1e-4),), 1e10, 1e11)
    weights = [
        [torch.randn(y, x, dtype=torch.bfloat16, device="cuda") * 0.02 for x, y in shape.linears]
        for _ in range(LAYERS)
    ]
    head = torch.randn(shape.vocabulary, shape.hidden, dtype=torch.bfloat16, device="cuda") * 0.02
    linears = tuple((n, shape.layers / LAYERS * kept_up(_linears(weights, n))) for n in TOKENS)
    heads = tuple((n, kept_up(_linears([[head]], n))) for n in SAMPLES)
    found = Sustained(shape, linears, heads, copy() * 1e12, _attention(shape))
    del weights, head
    torch.cuda.empty_cache()
    return found


def kept_up(work: Callable[[], object]) -> float:
    """Returns the seconds of `work` after it has been repeated for SECONDS, in a CUDA graph."""
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    began, times = time.perf_counter(), []
    while time.perf_counter() - began < SECONDS:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(4):
            graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 4e3)
    return statistics.median(times[len(times) // 2 :])


def between(table: Sequence[tuple[int, float]], n: int) -> float:
    """Interpolates linearly at `n` between measured points. Beyond the last it is proportional. At 0 it is 0."""
    if n == 0:
        return 0.0
    at = bisect.bisect_left(table, (n, 0.0))
    if at == len(table):
        return table[-1][1] * n / table[-1][0]
    if at == 0 or table[at][0] == n:
        return table[at][1]
    (low, less), (high, more) = table[at - 1], table[at]
    return less + (more - less) * (n - low) / (high - low)


def _linears(weights: Sequence[Sequence[torch.Tensor]], n: int) -> Callable[[], None]:
    inputs = [torch.randn(n, weight.shape[1], dtype=torch.bfloat16, device="cuda") for weight in weights[0]]

    def work() -> None:
        for layer in weights:
            for x, weight in zip(inputs, layer, strict=True):
                F.linear(x, weight)

    return work


def _attention(shape: Shape, prompts: int = 2, length: int = 4096) -> float:
    """Returns the flops per second of causal attention, with the fastest of torch's backends."""
    q = torch.randn(prompts, shape.heads, length, shape.size, dtype=torch.bfloat16, device="cuda")
    k, v = (torch.randn(prompts, shape.kv_heads, length, shape.size, dtype=q.dtype, device="cuda") for _ in range(2))
    flops = 2 * 2 * prompts * shape.heads * shape.size * (length * (length + 1) // 2)
    best = 0.0
    for backend in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION):
        try:
            with sdpa_kernel(backend):
                took = kept_up(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True))
        except RuntimeError:  # this build of torch lacks the backend
            continue
        best = max(best, flops / took)
    return best


# --- a row, step by step -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    """The plan of one step."""

    seconds: float
    """Until the host planned the next step."""
    prompt: int
    """Tokens of prompts."""
    pairs: int
    """Tokens that they attend to, added up."""
    rows: int
    """Rows that decode."""
    kv: int
    """KV tokens of these rows together."""
    samples: int
    """Tokens that are drawn."""


def traced(bench: BenchEngine, lengths: Sequence[Lengths]) -> list[Step]:
    """Runs the requests at once, and notes the plan of every step. If the engine runs ahead of the GPU, a step's
    seconds are those of the step before it. So sums over many steps have a meaning, single ones do not."""
    scheduler = bench.engine._scheduler  # only a plan says what a step contains
    plans: list[tuple[float, StepPlan]] = []
    inner = scheduler.plan

    def plan() -> StepPlan | None:
        found = inner()
        if found is not None:
            plans.append((time.perf_counter(), found))
        return found

    with patch.object(scheduler, "plan", plan):
        bench.run(lengths)
    ends = [*(at for at, _ in plans[1:]), time.perf_counter()]
    return [_step(end - at, plan) for (at, plan), end in zip(plans, ends, strict=True)]


def _step(seconds: float, plan: StepPlan) -> Step:
    rows = plan.n_decode
    start, count = (column[rows:].astype(np.int64) for column in (plan.start, plan.n_query))
    return Step(
        seconds=seconds,
        prompt=int(count.sum()),
        pairs=int((count * start + count * (count + 1) // 2).sum()),
        rows=rows,
        kv=int(plan.start[:rows].sum()) + rows,
        samples=plan.sample_row.size,
    )


def beside(bench: Bench, rows: Iterable[Row], limits: Sustained) -> list[str]:
    """Runs every row's loads once more and prints their steps by kind. Returns a line per row."""
    lines = []
    for row in rows:
        runs = [traced(bench.engine, load) for load in row.loads(bench)]
        if runs:
            took = row.figure(bench, [sum(step.seconds for step in run) for run in runs])
            best = row.figure(bench, [limits.seconds(run) for run in runs])
            lines.append(f"{row.title}, once more step by step: {took:,.4g} {row.unit}, at best {best:,.4g}")
            print("\n".join((lines[-1], *phases(runs[0], limits))), flush=True)
    return lines


def phases(steps: Sequence[Step], limits: Sustained) -> Iterator[str]:
    """Yields the time of each kind of step in a run, beside its lower bound."""
    kinds: list[tuple[str, Callable[[Step], bool]]] = [
        ("all", lambda step: True),
        ("with prompts", lambda step: step.prompt > 0),
        ("decoding above 256 rows", lambda step: not step.prompt and step.rows > 256),
        ("65 to 256 rows", lambda step: not step.prompt and 64 < step.rows <= 256),
        ("1 to 64 rows", lambda step: not step.prompt and step.rows <= 64),
    ]
    for name, of_kind in kinds:
        found = [step for step in steps if of_kind(step)]
        if found:
            took, best = sum(step.seconds for step in found), limits.seconds(found)
            prompts, rows = sum(step.prompt for step in found), sum(step.rows for step in found)
            yield (
                f"  {name:<24} {len(found):>5} steps of {prompts:>8,} + {rows:>8,} tokens: {took:>7.3f} s, "
                f"at best {best:>7.3f} ({best / took:.0%})"
            )
