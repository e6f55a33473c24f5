"""The GPU kernels of one engine step, those with the most time first.

    python benchmarks/step_kernels.py [--model llama-3.1-8b] [--set mode=fp8w8a8] [--batches 1 64] [--prefill]

The engine is that of gpu.py: random weights from a config.json, no prefix cache. A decode step follows prompts of 512
tokens and is a CUDA graph. For prefill, prompts of 4,096 tokens come by two. The scheduler may give a step fewer
tokens, which grids show. With `--mixed`, prompts of 512 tokens come beside 64 answers. torch's profiler records 8
steps. Recording slows them down, so the script times 8 steps before. gpu.py has the exact time of a step.

A row is a kernel with one grid between the same two kernels. So linears that share a kernel have rows of their own.
Kernels overlap: one starts while the kernel before it still runs, and waits for its results. So the sum of their times
exceeds the step. "us added" is the time from the end of all kernels before it to its own end. These times add up to
the step.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from gpu import config_of
from llmcore.api.bridge import Submit
from llmcore.api.errors import LlmcoreError
from llmcore.engine.graphs import CAPTURED_AT
from llmcore_devtools.bench.engine_runs import BenchEngine
from torch.profiler import ProfilerActivity, profile

OWNER = 0
STEPS = 8
"""Steps that are recorded, and as many that are timed before."""
WARMUP = 2 * CAPTURED_AT
"""Steps before these."""
DECODE, PREFILL = (512, 256), (4096, 1)
"""Tokens of a prompt and of its answer, which does not end before the last step."""
PROMPTS = 2
"""Prompts of a prefill step."""
ANSWERS, CROWD = 64, 800
"""Answers of a mixed step, and the prompts that come beside them."""
LEAST = 0.001
"""Rows with a smaller share of the kernels' time are shown as one."""

Event = Mapping[str, Any]
"""An event of a Chrome trace. `ts` and `dur` are microseconds."""


class Row(NamedTuple):
    """A kernel with its grid, and the kernels before and after it. The other fields are those of one step. `us` and
    `added` are microseconds: of its own, and by which the step is longer (see above)."""

    name: str
    grid: str
    between: str
    calls: float
    us: float
    added: float


def rows_of(events: Iterable[Event], steps: int) -> list[Row]:
    """Returns rows of the GPU's events in `steps` equal steps, those with the most time first."""
    ordered = sorted(events, key=lambda event: float(event["ts"]))
    kernels = [event for event in ordered if event["cat"] == "kernel"]
    names = [short(event["name"]) for event in kernels]
    times = defaultdict[tuple[str, str, str], list[tuple[float, float]]](list)
    ended = float(ordered[0]["ts"])
    for at, event in enumerate(kernels):
        # steps are equal, so the last kernel of one comes before the first of the next
        between = f"{names[at - 1][:24]}, {names[(at + 1) % len(names)][:24]}"
        end = float(event["ts"]) + float(event["dur"])
        key = names[at], "x".join(map(str, event["args"]["grid"])), between
        times[key].append((float(event["dur"]), max(end - ended, 0.0)))
        ended = max(ended, end)
    for event in ordered:
        if event["cat"] != "kernel":  # copies run beside kernels, at no fixed place
            times[event["name"], "", ""].append((float(event["dur"]), 0.0))
    rows = [
        Row(*key, len(found) / steps, *(sum(column) / steps for column in zip(*found, strict=True)))
        for key, found in times.items()
    ]
    return sorted(rows, key=lambda row: -row.us)


def short(name: str) -> str:
    """Returns a kernel's name without its return type, template arguments and parameters."""
    return re.split(r"[<(]", name.removeprefix("void ").replace("(anonymous namespace)::", ""))[0]


def spans(events: Iterable[Event]) -> tuple[float, float]:
    """Returns microseconds from the first event to the end of the last, and those in which any runs."""
    pieces = sorted((float(event["ts"]), float(event["ts"]) + float(event["dur"])) for event in events)
    busy, until = 0.0, pieces[0][0]
    for start, end in pieces:
        busy += max(end - max(start, until), 0.0)
        until = max(until, end)
    return until - pieces[0][0], busy


def table(events: Sequence[Event], steps: int, step_ms: float) -> Iterator[str]:
    """Yields lines. `step_ms`: milliseconds of a step that was not recorded."""
    rows, (span, busy) = rows_of(events, steps), spans(events)
    total = sum(row.us for row in rows)
    layout = "{:<44} {:>12} {:>7} {:>9} {:>9} {:>10} {:>6}  {}"
    yield layout.format("kernel", "grid", "calls", "us each", "us added", "us a step", "share", "between")
    shown = [row for row in rows if row.us >= LEAST * total]
    few = [row for row in rows if row.us < LEAST * total]
    rest = Row(f"{len(few)} others", "", "", *map(sum, zip(*(row[3:] for row in few), strict=True))) if few else None
    for row in [*shown, rest] if rest else shown:
        each = f"{row.us / row.calls:.2f}", f"{row.added / row.calls:.2f}"
        figures = f"{row.calls:g}", *each, f"{row.us:.1f}", f"{row.us / total:.1%}"
        yield layout.format(row.name[:44], row.grid, *figures, row.between)
    yield (
        f"kernels {total / 1e3:.3f} ms; a recorded step {span / steps / 1e3:.3f} ms, of which no kernel runs for "
        f"{(span - busy) / steps / 1e3:.3f} ms; a step that is not recorded {step_ms:.3f} ms"
    )


def begin(bench: BenchEngine, requests: Iterable[Submit], together: int) -> None:
    """Submits requests. Returns when `together` of them have a token and the step is captured."""
    for request in requests:
        bench.engine.submit(request, OWNER)
    begun = set[int]()
    while len(begun) < together:
        for events in bench.engine.step():
            if OWNER in events:
                for code, text in events[OWNER].error.values():
                    raise LlmcoreError(f"a request failed: {code}: {text}")
                begun.update(events[OWNER].request)
    make_steps(bench, WARMUP)


def make_steps(bench: BenchEngine, count: int) -> float:
    """Returns the milliseconds of one step."""
    began = time.perf_counter()
    for _ in range(count):
        bench.engine.step()
    return 1e3 * (time.perf_counter() - began) / count


def recorded(bench: BenchEngine) -> list[Event]:
    """Returns the GPU's events of STEPS steps."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        make_steps(bench, STEPS)
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        trace.export_chrome_trace(str(path := Path(folder) / "trace.json"))
        events = json.loads(path.read_text())["traceEvents"]
    found = [event for event in events if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    if not found:
        raise SystemExit("torch's profiler recorded no kernel: may this process use CUPTI?")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-3.1-8b", help="a name in benchmarks/configs, or a directory")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a setting of llmcore serve")
    parser.add_argument("--batches", nargs="*", type=int, default=[1, 64, 256], help="rows of the decode steps")
    parser.add_argument("--prefill", action="store_true", help="also a prefill step")
    parser.add_argument("--mixed", action="store_true", help="also a step of prompts beside answers")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("step_kernels.py records the kernels of a GPU, and there is none here")
    # torch sets both where it captures graphs itself: CUPTI crashes if it starts a second time beside them
    os.environ |= {"TEARDOWN_CUPTI": "0", "DISABLE_CUPTI_LAZY_REINIT": "1"}
    loads = [(f"decode, batch {batch}", [DECODE] * batch, batch) for batch in options.batches]
    if options.prefill:
        prompts = PROMPTS * (WARMUP + 2 * STEPS + 4)  # some steps are in flight
        loads.append((f"prefill, {PROMPTS} x {PREFILL[0]:,}", [PREFILL] * prompts, PROMPTS))
    if options.mixed:
        loads.append((f"prompts beside {ANSWERS} answers", [DECODE] * ANSWERS + [(DECODE[0], 1)] * CROWD, ANSWERS))
    with BenchEngine(config_of(options)) as bench:
        for label, text in dict(bench.facts.report).items():
            print(f"{label}: {text}")
        for title, lengths, together in loads:
            if reason := bench.fits(together, sum(lengths[0])):
                raise SystemExit(f"{title}: {reason}")
            begin(bench, requests := [bench.request(*each) for each in lengths], together)
            step_ms = make_steps(bench, STEPS)
            print("", title, *table(recorded(bench), STEPS, step_ms), sep="\n", flush=True)
            for request in requests:
                bench.engine.abort(request.id, OWNER)
            while not bench.engine.idle:
                bench.engine.step()
    return 0


if __name__ == "__main__":
    sys.exit(main())
