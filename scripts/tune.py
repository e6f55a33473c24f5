"""Times the plugins' kernels on this GPU, and writes the best of each to a table by which kernels are chosen.

    python scripts/tune.py --model benchmarks/configs/llama-3.1-8b --out plugins/triton/llmcore_triton/tuned
    python scripts/tune.py --model ... --out ... --layout token-int8
    python scripts/tune.py --model ... --out ... --mode triton_w4a16 g64 --all

It covers all that serving each `--model` needs: every op, shape and token bucket, with `--mode` those that the modes
add. Each kernel with a `cost` runs in all its configurations (`candidates` and `make_with` beside its `make`). Runs
are replays of CUDA graphs over weights and KV that no cache holds. A figure is the geometric mean over a bucket's
cases. The best configuration of each kernel is compared with the op's reference before it is written. Kernels of the
plain op are timed beside those for quantized tensors, and only printed. Other processes compile first, into Triton's
cache on disk.

Serving runs steps of more than 64 tokens one after the other at the GPU's power limit, where its clock settles within
a second. So a configuration for such steps runs for 0.1 s before each case is timed. The best two then run for 1 s,
and are timed again. A kernel with 24 configurations and two cases takes 9 s in such a bucket. The script says what
heating took in all.

The script keeps to `--budget` seconds. It leaves out what it does not reach (or keeps it from an existing table), and
says so.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import math
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from llmcore.api.specs import KernelSpec, OpContext, OpSpec
from llmcore.config import Config
from llmcore.engine.model import pick_device
from llmcore.ops import packing
from llmcore.registry.loader import build_registry, load, select
from llmcore.registry.registry import Registry
from llmcore.registry.resolve import bucket_text, why_not
from llmcore_devtools.kernels.compare import compare
from llmcore_triton.tuned import written
from tune_cases import PLAIN, TUNABLE, Call, Kernel, Workload, contexts, kernels_of, packed, plain_of

Timer = Callable[[Sequence[Call], float], float]
"""(calls, seconds to run before) -> microseconds per call."""

MEASURED = re.compile(r"measured|\d us")
"""Reasons to decline that come from measurements or from their absence. This script makes new ones."""

HOT = (3, 4)
"""The token buckets that serving runs at the GPU's power limit."""

SCREEN, HEAT = 0.1, 1.0
"""Seconds for which calls in these buckets run before they are timed: each configuration, and the FINALISTS."""

FINALISTS = 2

COMPILING = 0.6
"""Share of the budget that compiling may take."""


@dataclass
class Job:
    """One kernel for one context, in all its configurations."""

    spec: KernelSpec
    context: OpContext
    configs: list[dict[str, Any]] = field(default_factory=list)

    def make(self, config: Mapping[str, Any]) -> Kernel:
        """Returns the kernel in one configuration: {} if it has no choice."""
        if not self.configs:
            return load(self.spec.make)(self.context)
        return _module(self.spec).make_with(self.context, config)

    @property
    def name(self) -> str:
        """Returns a name for people."""
        shape = ", ".join(f"{k}={v}" for k, v in self.context.shape.items() if v not in (None, False))
        return f"{self.context.op}={self.spec.name}, {bucket_text(self.context.bucket)} tokens, {shape}"


def _module(spec: KernelSpec) -> Any:
    return importlib.import_module(spec.make.partition(":")[0])


def jobs_for(registry: Registry, wanted: Iterable[OpContext], most: int | None = None) -> list[Job]:
    """Returns every kernel that can take each context, with at most `most` configurations of each."""
    found = []
    for context in wanted:
        for spec in kernels_of(registry, context.op):
            reason = why_not(spec, context)
            if reason is None or MEASURED.search(reason):
                candidates = getattr(_module(spec), "candidates", None)
                found.append(Job(spec, context, list(candidates(context))[:most] if candidates else []))
    return found


def measure(
    registry: Registry,
    jobs: Sequence[Job],
    device: torch.device,
    timer: Timer,
    left: Callable[[], float],
    counts: Sequence[int] | None = None,
    every: bool = False,
    keep: Callable[[Mapping[str, Any]], object] = lambda entry: None,
) -> tuple[list[dict[str, Any]], list[str]]:
    """Returns entries for the table, and messages: kernels that failed, and those for which no time was `left`.

    `counts`: tokens of the cases, instead of those of real steps. `every`: print the time of each configuration.
    `keep` is called with each entry at once.
    """
    entries, notes, missed = [], [], 0
    grouped: dict[int, list[Job]] = {}
    for job in jobs:
        grouped.setdefault(id(job.context), []).append(job)
    for alike in grouped.values():
        if left() <= 0:
            missed += len(alike)
            continue
        load_of = Workload(registry, alike[0].context, device, counts)
        for job in alike:
            entry = _best(registry, job, load_of, timer, notes, left, every)
            if entry is not None:
                entries.append(entry)
                keep(entry)
                print(f"{entry['us']:10.2f} us  {job.name}  {entry['config'] or ''}", flush=True)
        del load_of
        gc.collect()
        if left() > 0:
            notes += _beside(registry, alike[0].context, device, timer, counts)
    return entries, [*notes, *([f"no time for {missed} kernels"] if missed else [])]


def _beside(
    registry: Registry, context: OpContext, device: torch.device, timer: Timer, counts: Sequence[int] | None
) -> Iterator[str]:
    """Time the kernels of the plain op as they are chosen today, and print it. Yields messages of those that fail."""
    plain = plain_of(registry, context)
    jobs = [] if plain is None else jobs_for(registry, [plain], most=0)
    load_of = Workload(registry, plain, device, counts) if plain is not None and jobs else None
    for job in jobs if load_of is not None else ():
        try:
            us = _mean(_times(load_of, job.make({}), timer, HEAT))
        except Exception as error:  # noqa: BLE001 - one that cannot run here is not compared
            yield f"beside it: {job.name}: {type(error).__name__}: {str(error).splitlines()[:1]}"
            continue
        print(f"{us:10.2f} us  beside it: {job.name}", flush=True)


def _times(load_of: Workload, kernel: Kernel, timer: Timer, heat: float) -> list[float]:
    """A kernel's microseconds in each case. `heat`: seconds, where serving is hot."""
    heat = heat if load_of.context.bucket in HOT else 0.0
    return [timer(calls, heat) for calls in load_of.calls(kernel)]


def _mean(times: Sequence[float]) -> float:
    """Returns the geometric mean."""
    return math.exp(sum(map(math.log, times)) / len(times))


def _best(
    registry: Registry,
    job: Job,
    load_of: Workload,
    timer: Timer,
    notes: list[str],
    left: Callable[[], float],
    every: bool,
) -> dict[str, Any] | None:
    configs, timed = job.configs or [{}], []
    finals = job.context.bucket in HOT and len(configs) > 1
    for config in configs:
        if left() <= 0 and timed:
            break
        try:
            times = _times(load_of, job.make(config), timer, SCREEN if finals else HEAT)
        except Exception as error:  # noqa: BLE001 - one that cannot run here is not chosen
            notes.append(f"{job.name}, {config}: {type(error).__name__}: {str(error).splitlines()[:1]}")
            continue
        timed.append((_mean(times), len(timed), config))
        if every:
            cases = ", ".join(f"{us:.2f}" for us in times)
            print(f"{_mean(times):14.2f} us ({cases})  {job.context.op}={job.spec.name} {config}", flush=True)
    timed.sort()
    if finals:
        again = [
            (_mean(_times(load_of, job.make(config), timer, HEAT)), at, config) for _, at, config in timed[:FINALISTS]
        ]
        timed = sorted(again) + timed[FINALISTS:]
    module = importlib.import_module(registry.find(OpSpec, job.context.op).module)
    for us, _, config in timed:
        try:
            kernel = _as_served(registry, job.make(config), job.context)
            compare(module, kernel, job.context, load_of.samples[0], load_of.device, long=True)
        except Exception as error:  # noqa: BLE001 - a wrong one is not chosen
            notes.append(f"{job.name}, {config} is WRONG: {str(error).splitlines()[:1]}")
            continue
        c = job.context
        shape = {name: value for name, value in c.shape.items() if value not in (None, False)}
        return {
            **{"op": c.op, "kernel": job.spec.name, "dtype": c.dtype, "bucket": c.bucket, "shape": shape},
            **({} if c.layout in (None, *PLAIN) else {"layout": c.layout}),
            **{"us": round(us, 2), "config": dict(config)},
        }
    return None


def _as_served(registry: Registry, kernel: Kernel, context: OpContext) -> Kernel:
    """Returns a kernel that packs its weights in each call, or the kernel itself if it packs none."""
    if packing([kernel]) is None:
        return kernel
    return lambda *sample: kernel(*packed(registry, kernel, context, sample))


# --- the GPU ---------------------------------------------------------------------------------------------------


@torch.inference_mode()
def replayed(calls: Sequence[Call], heat: float, least: float = 1500.0, rounds: int = 3) -> float:
    """Returns microseconds per call in a captured graph, the best of `rounds` of at least `least` microseconds.

    The graph runs for `heat` seconds before.
    """
    calls[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

    def run(times: int) -> float:
        start.record()
        for _ in range(times):
            graph.replay()
        end.record()
        end.synchronize()
        return 1000 * start.elapsed_time(end)

    graph.replay()
    once = max(run(1), 1.0)
    if heat:
        run(math.ceil(1e6 * heat / once))
    times = max(1, round(least / once))
    best = min(run(times) for _ in range(rounds)) / times / len(calls)
    graph.reset()
    return best


def compile_apart(processes: int, seconds: float) -> None:
    """Run this script's kernels once in `processes` processes, each its share, for at most `seconds`."""
    command = [sys.executable, __file__, *sys.argv[1:]]
    children = [
        subprocess.Popen([*command, "--share", f"{i}/{processes}"], stdout=subprocess.DEVNULL)
        for i in range(processes)
    ]
    end = time.monotonic() + seconds
    for child in children:
        try:
            child.wait(max(end - time.monotonic(), 0.1))
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


@torch.inference_mode()
def compile_share(registry: Registry, pairs: Sequence[tuple[Job, dict[str, Any]]], device: torch.device) -> None:
    """Make and run each job in its configuration once. Pairs of one context are adjacent."""
    load_of: Workload | None = None
    for job, config in pairs:
        try:
            if load_of is None or load_of.context is not job.context:
                load_of = None
                load_of = Workload(registry, job.context, device)
            for calls in load_of.calls(job.make(config), cold=False):
                calls[0]()
            torch.cuda.synchronize()
        except Exception as error:  # noqa: BLE001 - it is said when it is measured
            print(job.name, config, error, file=sys.stderr)


# --- the command line ---------------------------------------------------------------------------------------------


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", type=Path, required=True, help="directories with a config.json")
    parser.add_argument("--out", type=Path, required=True, help="folder of the table")
    parser.add_argument("--ops", nargs="+", choices=TUNABLE, default=[op for op in TUNABLE if op != "sample"])
    parser.add_argument("--kernels", nargs="+", help="names of kernels to time; all, if none is given")
    parser.add_argument("--buckets", nargs="+", type=int, default=[0, 1, 2, 3, 4])
    parser.add_argument("--layout", help="of KV that a mode stores, such as token-int8: times attention over it")
    parser.add_argument("--mode", nargs="+", default=[], help="as in llmcore serve: times what the modes add")
    parser.add_argument("--tp", type=int, default=1, help="as in llmcore serve: times the share of one rank")
    parser.add_argument("--all", action="store_true", help="print each configuration's time, and those of its cases")
    parser.add_argument("--dtype", default="bf16", help="as --data_type")
    parser.add_argument("--heat", type=float, default=HEAT, help="seconds for which the best two run, where it is hot")
    parser.add_argument("--budget", type=float, default=230.0, help="seconds")
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="that compile; 0: compile while timing")
    parser.add_argument("--share", help=argparse.SUPPRESS)
    return parser.parse_args()


@torch.inference_mode()
def main() -> int:
    options = parse()
    end = time.monotonic() + options.budget
    registry = build_registry(Config(discovered=select(None).plugins))
    device = pick_device(registry, "auto")
    if device.torch_device.type == "cpu":
        raise SystemExit("tune.py times kernels on a GPU, and there is none here")
    wanted = [
        context
        for model in options.model
        for context in contexts(
            registry, model, device.info, options.ops, options.dtype, options.layout, options.mode, options.tp
        )
        if context.bucket in options.buckets
    ]
    jobs = [job for job in jobs_for(registry, wanted) if options.kernels is None or job.spec.name in options.kernels]
    if options.share:
        first, _, step = options.share.partition("/")
        pairs = [(job, config) for job in jobs for config in job.configs or [{}]]
        compile_share(registry, pairs[int(first) :: int(step)], device.torch_device)
        return 0
    print(f"{len(jobs)} kernels, {sum(len(job.configs) or 1 for job in jobs)} configurations", flush=True)
    if options.processes:
        began = time.monotonic()
        compile_apart(options.processes, COMPILING * options.budget)
        print(f"compiled in {time.monotonic() - began:.0f} s", flush=True)
    heated = 0.0

    def timer(calls: Sequence[Call], heat: float) -> float:
        nonlocal heated
        heat = min(heat, options.heat)
        heated += heat
        return replayed(calls, heat)

    def keep(entry: Mapping[str, Any]) -> None:
        # a run that is ended from outside loses nothing
        written(options.out, [entry], device.info, {"torch": torch.__version__, "triton": _triton()})

    def left() -> float:
        return end - time.monotonic()

    entries, notes = measure(registry, jobs, device.torch_device, timer, left, every=options.all, keep=keep)
    print(f"{heated:.0f} s of it heated the GPU")
    print(f"{len(entries)} entries in {options.out}")
    for note in notes:
        print(note)
    return 0


def _triton() -> str:
    return str(importlib.import_module("triton").__version__)


if __name__ == "__main__":
    sys.exit(main())
