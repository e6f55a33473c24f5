"""The pauses of streams while prompts are computed: the real scheduler on a simulated clock, without a GPU.

    OMP_NUM_THREADS=1 python benchmarks/gaps.py [--rate 48] [--seconds 60] [--stall_ms 0 15 25 40]

Requests have the lengths of real conversations (`lengths/sharegpt_qwen3.csv`). They arrive at a steady rate, and then
1,000 of them at once. A step takes as long as Qwen3-8B in bf16 was measured to take on an H200: a table over the new
tokens, plus the KV that decode rows read. Two numbers are fitted to what clients of a real server saw without a limit
(`MIXED`, `TRAVEL_MS`). For every `--prefill_stall_ms` the script prints what clients would see, p50 and p99 over
requests in ms: the first token, the time per further token and the longest gap inside an answer. It also prints the
seconds that the burst takes. `online_gpu.py` measures the same on a GPU.
"""

from __future__ import annotations

import argparse
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from llmcore.api.bridge import Prompt, Submit
from llmcore.api.protocols import SchedulerLimits
from llmcore.builtin.estimators import PastFuture
from llmcore.builtin.fcfs import FCFS
from llmcore.builtin.radix import NoCache
from llmcore.kv.space import KVGroup
from llmcore.sched.plan import StepPlan, StepResult
from llmcore.sched.scheduler import Scheduler
from llmcore_devtools.bench.figures import percentile
from llmcore_devtools.bench.load import departures
from llmcore_devtools.bench.workloads import Lengths, read_lengths

LENGTHS = Path(__file__).resolve().parent / "lengths" / "sharegpt_qwen3.csv"
STEPS = (
    (1, 4.17),
    (8, 4.48),
    (32, 4.79),
    (64, 4.81),
    (128, 5.25),
    (256, 7.1),
    (512, 12.6),
    (1024, 25.3),
    (8192, 198.0),
)
"""(new tokens, ms) of a step without the KV that decode rows read. Decode steps were measured at a context of 576,
from which the KV is subtracted. Others are one prompt of 512 tokens, of 1,024, and 8,192 at the measured prefill
rate."""
MIXED = 1.1
"""Factor of the time of a step with prompts in it."""
ROW_MS = 0.0385e-3
"""Milliseconds to read one token of KV in all layers: 147 KB at 3.8 TB/s."""
RATE = 41.4
"""Prompt tokens that the device computes in a millisecond."""
CAPTURED, LAUNCH_MS, EAGER_MS = 512, 0.5, 7.6
"""A step of at most `CAPTURED` tokens is replayed, which takes the host `LAUNCH_MS`. A larger one is launched eagerly,
which takes it `EAGER_MS`."""
TRAVEL_MS = 6.0
"""Milliseconds from the client to the engine and back."""


@dataclass
class Request:
    """The client's view of one request. Times are in ms."""

    sent: float
    lengths: Lengths
    tokens: int = 0
    first: float = 0.0
    last: float = 0.0
    longest: float = 0.0

    def take(self, now: float) -> None:
        """A token arrives."""
        if self.tokens:
            self.longest = max(self.longest, now - self.last)
        else:
            self.first = now
        self.tokens += 1
        self.last = now


@dataclass
class Device:
    """Computes when launched steps end. Times are in ms."""

    free: float = 0.0
    steps: list[float] = field(default_factory=list)

    def launch(self, plan: StepPlan, now: float) -> tuple[float, float]:
        """Returns (when the host is free again, when the step ends)."""
        tokens, times = zip(*STEPS, strict=True)
        context = int((plan.start[: plan.n_decode] + 1).sum())
        prompts = plan.n_decode < plan.request.size
        spent = float(np.interp(plan.n_tokens, tokens, times)) * (MIXED if prompts else 1.0) + context * ROW_MS
        captured = plan.n_tokens <= CAPTURED
        host = now + (LAUNCH_MS if captured else EAGER_MS)
        begins = max(self.free, host if captured else now + LAUNCH_MS)
        self.free = max(begins + spent, host)
        self.steps.append(spent)
        return host, self.free


def tokens_within(stall_ms: float) -> int:
    """Returns the prompt tokens that make a step so much longer, as the start computes them."""
    return int((stall_ms + STEPS[0][1]) * RATE) if stall_ms else 0


def make_scheduler(stall_ms: float) -> Scheduler:
    """Returns the scheduler of a server on one GPU."""
    limits = SchedulerLimits(
        max_running=1000,
        max_input_len=8_191,
        max_total_len=8_192,
        batch_tokens=8_192,
        chunk_tokens=8_192,
        stall_tokens=tokens_within(stall_ms),
    )
    group = KVGroup(total=800_000, rows=1000, max_len=8_192, manager=NoCache(1))
    return Scheduler(limits, [group], FCFS(limits), PastFuture(limits), ahead=1)


def serve(scheduler: Scheduler, requests: list[Request]) -> Device:
    """Serve all requests in simulated time."""
    device, now, flying = Device(), 0.0, deque[tuple[StepPlan, float]]()
    waiting = deque(enumerate(requests))
    while waiting or flying or not scheduler.idle:
        while waiting and waiting[0][1].sent + TRAVEL_MS / 2 <= now:
            number, request = waiting.popleft()
            prompt, output = request.lengths
            ids = Prompt.of([0] * prompt)
            scheduler.submit(Submit(id=number, prompt=ids, max_new_tokens=output), 0)
        plan = scheduler.plan()
        if plan is not None:
            now, ends = device.launch(plan, now)
            flying.append((plan, ends))
        if flying and (plan is None or len(flying) > 1):
            done, ends = flying.popleft()
            now = max(now, ends)
            read(scheduler, done, requests, now + TRAVEL_MS / 2)
        elif plan is None and waiting:
            now = max(now, waiting[0][1].sent + TRAVEL_MS / 2)
    return device


def read(scheduler: Scheduler, plan: StepPlan, requests: list[Request], now: float) -> None:
    """Commit a step, and hand out its tokens."""
    sampled = plan.sample_row.size
    result = StepResult(np.zeros(sampled, np.int32), np.ones(sampled, np.bool_))
    for events in scheduler.commit(plan, result).values():
        for number in events.request:
            requests[number].take(now)


def simulated(stall_ms: float, lengths: list[Lengths], rate: float, seed: int) -> tuple[list[Request], Device]:
    """Simulates one rate."""
    times = departures(len(lengths), rate, seed)
    requests = [Request(at * 1e3, pair) for at, pair in zip(times, lengths, strict=True)]
    return requests, serve(make_scheduler(stall_ms), requests)


def main() -> None:
    """Print a line for every setting."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rate", type=float, default=48.0)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--stall_ms", type=float, nargs="+", default=[0.0, 15.0, 20.0, 25.0, 30.0, 40.0])
    parser.add_argument("--burst", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=7)
    options = parser.parse_args()
    steady = list(read_lengths(LENGTHS, int(options.rate * options.seconds), options.seed).lengths)
    burst = list(read_lengths(LENGTHS, options.burst, options.seed).lengths)
    layout = "{:>9}  {:>8}  {:>17}  {:>15}  {:>17}  {:>8}"
    print(layout.format("stall, ms", "tokens", "first p50 / p99", "per token", "longest gap", "burst, s"))
    for stall in options.stall_ms:
        requests, _ = simulated(stall, steady, options.rate, options.seed)
        at_once, _ = simulated(stall, burst, float("inf"), options.seed)
        several = [request for request in requests if request.tokens > 1]
        columns = (
            [request.first - request.sent for request in requests],
            [(request.last - request.first) / (request.tokens - 1) for request in several],
            [request.longest for request in several],
        )
        shown = [f"{percentile(column, 50):.1f} / {percentile(column, 99):.1f}" for column in columns]
        total = max(request.last for request in at_once) / 1e3
        print(layout.format(f"{stall:g}", tokens_within(stall) or "-", *shown, f"{total:.2f}"), flush=True)


if __name__ == "__main__":
    main()
