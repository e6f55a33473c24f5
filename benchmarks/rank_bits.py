"""Compares what all ranks of a model must have alike, to the bit, in every step of a long run.

    python benchmarks/rank_bits.py [--model llama-3.1-8b] [--steps 10000] [--set tp=2] [--set NAME=VALUE ...]

Weights are random, from a config.json alone. Prompts and answers have many lengths, so that steps are prompts, answers
and both; draws are greedy, sampled, and filtered by turns. Every process adds checksums to a table on its device, in
captured steps too, and writes the table when it ends. The script prints each column: the steps that have a checksum,
those in which ranks differ, and the first of them. Exit code 1 if there is one.

Try it without a GPU: `--set device=cpu --set data_type=f32` and a small model. Checksums cost time, so steps here are
slower than served ones. A step of one token whose experts are chosen inside a kernel has no checksum for its router;
`--set kernel=moe.fused=torch` makes the choice an op of its own.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from random import Random

from gpu import config_of
from llmcore.api.bridge import SamplingParams
from llmcore_devtools.bench.engine_runs import BenchEngine
from llmcore_devtools.bench.replicated import CAPACITY, COLUMNS, compare, observed
from llmcore_devtools.bench.workloads import Lengths

DRAWS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0, seed=7),
    SamplingParams(temperature=0.8, top_p=0.9, seed=11),
)


def mix(count: int, longest: int) -> list[Lengths]:
    """(prompt, answer) of `count` requests: most are short, and a few have up to half of `longest` tokens each."""
    draw = Random(20).random
    return [tuple(max(1, int(longest / 2 * draw() ** 2)) for _ in range(2)) for _ in range(count)]  # type: ignore[misc]


def main(given: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-3.1-8b", help="a name in benchmarks/configs, or a directory")
    parser.add_argument("--steps", type=int, default=10_000, help=f"at least, up to {CAPACITY // 2:,}")
    parser.add_argument("--requests", type=int, default=48, help="at once")
    parser.add_argument("--longest", type=int, default=1024, help="tokens of the longest prompt and answer")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a setting of llmcore serve")
    options = parser.parse_args(given)
    if not 0 < options.steps <= CAPACITY // 2:
        parser.error(f"--steps {options.steps}: give 1 to {CAPACITY // 2:,}")
    if not any(text.startswith("tp=") for text in options.set):
        options.set.append("tp=2")
    config = config_of(options)
    began, lengths = time.monotonic(), mix(options.requests, options.longest)
    with tempfile.TemporaryDirectory() as folder:
        with BenchEngine(observed(config, Path(folder))) as engine:
            for draws in cycle(DRAWS):
                engine.sampling = draws
                engine.run(lengths)
                load = engine.engine.load()
                if load.steps >= options.steps:
                    break
        steps, compared = compare(Path(folder), config.model.ranks)
    what = f"{steps:,} steps with those of the start, {load.graphs} captured graphs, {load.preemptions} preemptions"
    print(f"{options.model}, tp={config.model.tp}: {what}, {time.monotonic() - began:.0f} s")
    print(f"{'column':<10} {'steps':>8} {'mismatches':>11} {'first':>8}")
    for one in compared:
        print(f"{one.column:<10} {one.filled:>8,} {one.mismatches:>11,} {one.first or '-':>8}  {COLUMNS[one.column]}")
    wrong = sum(one.mismatches for one in compared)
    print("the ranks have the same bits" if not wrong else "THE RANKS DIFFER")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
