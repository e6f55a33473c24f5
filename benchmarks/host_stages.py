"""The host's work between a request and its tokens, stage by stage, on any machine and without a GPU.

    OMP_NUM_THREADS=1 python benchmarks/host_stages.py [--model llama-3.1-8b] [--rows 1 64 256] [--cache] [--ops]

The engine is that of `host_cost.py`, on a device that is one step ahead. Its graphs replay nothing. The rest is the
host's work around a forward. The script shows each stage's own time, without the stages inside it, in the fastest
tenth of the steps by that stage, because a busy machine only adds to it. It shows three steps: one prompt that comes
to an idle engine, a steady decode step, and a large step of decode rows and prompts, which is launched kernel by
kernel. `--ops` counts torch's operators by stage: on a GPU each is a launch. The time of the driver, and of torch for
a GPU, is not measured.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import host_cost
import torch
from llmcore.api import DeviceSpec, hookimpl
from llmcore.engine.engine import Engine
from llmcore.engine.graphs import Graphs
from llmcore.engine.model_runner import ModelRunner
from llmcore.engine.sampler import RowSampler
from llmcore.engine.tables import Tables, Upload
from llmcore.sched import scheduler
from llmcore.sched.capacity import Capacity
from llmcore.sched.in_flight import Results
from llmcore.sched.policy import StepView
from llmcore.sched.release import Release
from llmcore.sched.scheduler import Scheduler
from torch.utils._python_dispatch import TorchDispatchMode

PROMPT, CHAT_ROWS, CHAT_PROMPTS = 512, 200, 6
STAGES: tuple[tuple[str, Any, str], ...] = (
    ("submit", Engine, "submit"),
    ("step", Engine, "step"),
    ("plan", Scheduler, "plan"),
    ("plan: view", Scheduler, "_view"),
    ("plan: policy, offers", Scheduler, "_decide"),
    ("plan: fits", StepView, "fits"),
    ("plan: capacity", Capacity, "__init__"),
    ("plan: settle", Scheduler, "_settle"),
    ("plan: slots", Scheduler, "_secure"),
    ("plan: enqueue", scheduler, "enqueue"),
    ("prepare", ModelRunner, "prepare"),
    ("prepare: admit", RowSampler, "admit"),
    ("prepare: pack", ModelRunner, "_pack"),
    ("prepare: pack changes", Tables, "pack"),
    ("enqueue", ModelRunner, "enqueue"),
    ("enqueue: send", Upload, "send"),
    ("enqueue: apply changes", Tables, "apply"),
    ("enqueue: change", ModelRunner, "_change"),
    ("enqueue: forward", ModelRunner, "_forward"),
    ("enqueue: replay", Graphs, "run"),
    ("enqueue: to host", RowSampler, "to_host"),
    ("read", ModelRunner, "read"),
    ("commit", Scheduler, "commit"),
    ("commit: results", Results, "take"),
    ("commit: ends", Release, "end"),
)


class Pretended(host_cost.Pretended):
    """A device one step ahead. A graph is the result of its work, and values that come to the host are zeros."""

    ahead = 1
    graphs = True
    graph_memory = 0

    def capture(self, work: Callable[[], Any]) -> tuple[Any, Any]:
        """Runs the work once."""
        return self, work()

    def replay(self) -> None:
        """Does nothing."""

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns ids of the vocabulary: no kernel wrote the memory."""
        return torch.zeros_like(tensor)


@hookimpl
def register_devices() -> Iterable[DeviceSpec]:
    """The script registers itself as a plugin."""
    yield DeviceSpec(name="replaying", make=f"{__name__}:Pretended", available=f"{__name__}:present")


def present() -> None:
    """Returns None: the device is always available."""


class Meter:
    """Seconds and torch operators of each stage of every step."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self.ops: Counter[str] = Counter()
        self._inside: list[list[Any]] = [["", 0.0]]
        self._on = False
        for stage, where, name in STAGES:
            setattr(where, name, self._timed(stage, getattr(where, name)))

    @contextmanager
    def one(self) -> Iterator[None]:
        """Counts what happens inside the block as one step."""
        self.steps.append(defaultdict(float))
        self._on = True
        try:
            yield
        finally:
            self._on = False

    def count(self, op: str) -> None:
        """Count a call of an operator."""
        if self._on:
            self.ops[f"{self._inside[-1][0]:<24} {op}"] += 1

    def _timed(self, stage: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **named: Any) -> Any:
            inside = self._inside
            inside.append([stage, 0.0])
            began = time.perf_counter()
            try:
                return function(*arguments, **named)
            finally:
                whole = time.perf_counter() - began
                _, others = inside.pop()
                inside[-1][1] += whole
                if self._on:
                    self.steps[-1][stage] += whole - others

        return timed

    def report(self, title: str) -> None:
        """Print the stages and forget the steps."""
        stages = [stage for stage, *_ in STAGES if any(stage in step for step in self.steps)]
        fast = {stage: _fast([step.get(stage, 0.0) for step in self.steps]) for stage in stages}
        whole = _fast([sum(step.values()) for step in self.steps])
        launched = _fast([sum(s for stage, s in step.items() if not _after(stage)) for step in self.steps])
        print(f"\n{title}: {whole:,.0f} us, of which {launched:,.0f} before the result is read")
        print("\n".join(f"  {us:>8.1f}  {stage}" for stage, us in fast.items() if us >= 0.05))
        for place, times in sorted(self.ops.items()):
            print(f"  {times / len(self.steps):>8.1f}  {place}")
        self.steps, self.ops = [], Counter()


class Ops(TorchDispatchMode):
    """Reports every operator to a meter."""

    def __init__(self, meter: Meter) -> None:
        super().__init__()
        self._meter = meter

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._meter.count(str(func))
        return func(*args, **(kwargs or {}))


def _after(stage: str) -> bool:
    return stage.startswith(("read", "commit"))


def _fast(seconds: list[float]) -> float:
    """Returns the microseconds of the fastest tenth."""
    return statistics.quantiles(seconds, n=10)[0] * 1e6


def first_tokens(bench: Any, meter: Meter, count: int, *, answer: bool = False) -> None:
    """Runs one prompt at a time, with an answer of one token. Measures the work until the launch, or after it
    (`answer`)."""
    for _ in range(count):
        request = bench.request(PROMPT, 1)
        with nullcontext() if answer else meter.one():
            bench.engine.submit(request)
            bench.engine.step()
        with meter.one() if answer else nullcontext():
            bench.engine.step()


def decode(bench: Any, meter: Meter, rows: int, count: int) -> None:
    """Run `count` steps of `rows` rows."""
    for _ in range(rows):
        bench.engine.submit(bench.request(16, count + 50))
    for _ in range(40):
        bench.engine.step()
    meter.steps = []
    for _ in range(count):
        with meter.one():
            bench.engine.step()
    finish(bench)


def chat(bench: Any, meter: Meter, count: int) -> None:
    """Run decode rows with prompts beside them: more tokens than are captured."""
    for _ in range(CHAT_ROWS):
        bench.engine.submit(bench.request(16, 2 * count + 100))
    for _ in range(20):
        bench.engine.step()
    meter.steps = []
    for _ in range(count):
        for _ in range(CHAT_PROMPTS):
            bench.engine.submit(bench.request(150, 1))
        with meter.one():
            bench.engine.step()
    finish(bench)


def finish(bench: Any) -> None:
    """End all requests, without measuring."""
    for request in list(bench.engine._scheduler._state.requests):
        bench.engine.abort(request[1], request[0])
    while not bench.engine.idle:
        bench.engine.step()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-3.1-8b")
    parser.add_argument("--rows", nargs="*", type=int, default=[1, 64, 256], help="of steady decode steps")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--cache", action="store_true", help="with the prefix cache")
    parser.add_argument("--ops", action="store_true", help="also count torch's operators by stage")
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    host_cost.pretend()
    settings = {
        "device": "replaying",
        "plugins": ["triton", "llama", "qwen", "deepseek", __file__],
        "max_total_token_num": 400_000,
        "batch_max_tokens": 8192,
        "running_max_req_size": 1000,
    }
    with host_cost.engine_of(options.model, 4096, prefix_cache=options.cache, **settings) as bench:
        meter = Meter()
        measured: list[tuple[str, Callable[[int], None]]] = [
            (f"one prompt of {PROMPT} tokens", lambda count: first_tokens(bench, meter, count)),
            ("its answer, planning beside the forward", lambda count: first_tokens(bench, meter, count, answer=True)),
            *((f"decode, {n} rows", lambda count, n=n: decode(bench, meter, n, count)) for n in options.rows),
            (f"{CHAT_ROWS} rows beside {CHAT_PROMPTS} prompts", lambda count: chat(bench, meter, count // 10)),
        ]
        for title, run in measured:
            run(options.steps // 10 + 20)
            meter.steps = []
            with Ops(meter) if options.ops else nullcontext():
                run(options.steps)
            meter.report(title)


if __name__ == "__main__":
    main()
