"""The time of decode rows, by kind of step.

    python benchmarks/steps.py [--model llama-3.1-8b] [--set mode=fp8w8a8] [--batches 64 256]

`gpu.py` measures a decode row as (T(in 512, out 129) - T(in 512, out 1)) / 128. So a row has more than decode steps:
prompts beside answers come in smaller steps than prompts alone. For each batch, the script makes both runs and prints
their steps by kind. The time of a step is that between two results. A line ends with the steps that took more than 1.5
times the median: their places among those of their kind, and the time beyond the median.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator

from gpu import Actions, Bench, config_of
from llmcore.engine.graphs import Action
from llmcore.engine.model_runner import Launched
from llmcore.sched.plan import StepPlan, StepResult
from llmcore_devtools.bench.engine_runs import BenchEngine

PROMPT, ANSWER = 512, 129
"""Tokens of each prompt, and of its answer in the longer run."""

LATE = 1.5
"""Times the median. Steps above it are listed."""

Step = tuple[StepPlan, Action, float]
"""A step, how it was enqueued, and the time at which its result was read."""

ENQUEUED = {Action.LAUNCH: "launched", Action.CAPTURE: "captured", Action.REPLAY: "CUDA graph"}


def kind_of(plan: StepPlan, action: Action) -> str:
    """Returns the kind of a step: what it computes, and how it was enqueued."""
    computes = "decode" if plan.n_decode == plan.request.size else "prompts and decode" if plan.n_decode else "prompts"
    return f"{computes}, {ENQUEUED[action]}"


def recorded(bench: BenchEngine, batch: int, answer: int) -> tuple[float, list[Step]]:
    """Returns the time at which a run began, and its steps."""
    runner, actions, steps = bench.engine._runner, Actions(bench), list[Step]()
    read = runner.read

    def and_note(step: Launched) -> StepResult:
        result = read(step)
        steps.append((step.plan, actions.of[step.plan.number], time.perf_counter()))
        return result

    runner.read = and_note  # type: ignore[method-assign]
    began = time.perf_counter()
    bench.run([(PROMPT, answer)] * batch)
    del runner.read
    actions.end()
    return began, steps


def table(began: float, steps: Iterable[Step]) -> Iterator[str]:
    """Yields a line for each kind of step."""
    found: defaultdict[str, list[tuple[float, int]]] = defaultdict(list)
    before = began
    for plan, action, at in steps:
        found[kind_of(plan, action)].append((1e3 * (at - before), plan.n_tokens))
        before = at
    for kind, each in found.items():
        times, tokens = zip(*each, strict=True)
        middle = sorted(times)[len(times) // 2]
        each_us = 1e3 * sum(times) / sum(tokens)
        late = [at for at, ms in enumerate(times) if ms > LATE * middle]
        beyond = sum(times[at] - middle for at in late)
        yield (
            f"  {kind:<32} {len(each):>4} steps {sum(times):>9.2f} ms  median {middle:>8.3f}  longest "
            f"{max(times):>8.3f}  {sum(tokens) / len(each):>8,.0f} tokens each  {each_us:>7.1f} us a token"
            + (f"  late: {' '.join(map(str, late))}, {beyond:.2f} ms" if late else "")
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-3.1-8b", help="a name in benchmarks/configs, or a directory")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a setting of llmcore serve")
    parser.add_argument("--batches", nargs="+", type=int, default=[64, 256])
    options = parser.parse_args()
    with BenchEngine(config_of(options)) as bench:
        for label, text in dict(bench.facts.report).items():
            print(f"{label}: {text}")
        for batch in options.batches:
            seconds = {}
            Bench(bench, repeats=1, shrink=1).capture(batch, PROMPT, PROMPT + ANSWER - 1)
            for answer in (ANSWER, 1):
                recorded(bench, batch, answer)
            for answer in (ANSWER, 1):
                began, steps = recorded(bench, batch, answer)
                seconds[answer] = steps[-1][-1] - began
                print(f"batch {batch}, answers of {answer}: {seconds[answer]:.3f} s")
                print("\n".join(table(began, steps)), flush=True)
            row = 1e3 * (seconds[ANSWER] - seconds[1]) / (ANSWER - 1)
            print(f"batch {batch}: the row of gpu.py is {row:.3f} ms", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
