"""Compares the tokens of kernels that overlap with those of kernels that run one after another.

    python benchmarks/overlap.py [--model llama-3.1-8b] [--set mode=fp8w8a8] [--batches 1 8 64]

On a Hopper a kernel starts while the one ahead still runs: see llmcore_triton.launch. A kernel that reads too early
what another one writes gives other tokens, though not each time. So ROUNDS rounds of the same greedy requests run in a
process whose kernels overlap. Then they run in a process whose kernels do not. The engine is that of gpu.py, with
random weights from a config.json. Exit code 1 if tokens differ.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys

import numpy as np
import torch
from gpu import config_of
from llmcore.api.bridge import Prompt, Submit, explode
from llmcore_devtools.bench.engine_runs import GREEDY, BenchEngine
from llmcore_triton import launch

ROUNDS = 4
PROMPT, ANSWER = 512, 64
"""Tokens of a prompt and of its answer."""

_OWNER = 0


def answers(bench: BenchEngine, batch: int, begin: int) -> str:
    """Returns a digest of the answers to `batch` requests, whose ids are `begin` and the next ones. Prompts are always
    the same."""
    draw = np.random.default_rng(batch)
    for at in range(batch):
        ids = draw.integers(0, bench.facts.vocab_size, PROMPT, np.int32)
        request = Submit(id=begin + at, prompt=Prompt.of(ids), max_new_tokens=ANSWER, sampling=GREEDY)
        bench.engine.submit(request, _OWNER)
    found: dict[int, list[int]] = {}
    while not bench.engine.idle:
        for events in bench.engine.step():
            for request_id, event in explode(events[_OWNER]) if _OWNER in events else ():
                found.setdefault(request_id - begin, []).extend(event.tokens)
    assert sorted(map(len, found.values())) == [ANSWER] * batch
    return hashlib.sha256(json.dumps(sorted(found.items())).encode()).hexdigest()[:16]


def rounds(options: argparse.Namespace) -> dict[str, list[str]]:
    """Returns the digests of ROUNDS rounds, by batch. Ids of requests are never used twice."""
    begin, found = 0, dict[str, list[str]]()
    with BenchEngine(config_of(options)) as bench:
        for batch in options.batches:
            found[str(batch)] = [answers(bench, batch, begin + turn * batch) for turn in range(ROUNDS)]
            begin += ROUNDS * batch
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-3.1-8b", help="a name in benchmarks/configs, or a directory")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a setting of llmcore serve")
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8, 64], help="requests at once")
    parser.add_argument("--kernels", choices=("overlapping", "apart"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.kernels:
        launch.APART = options.kernels == "apart"
        print(json.dumps(rounds(options)))
        return 0
    if not torch.cuda.is_available():
        raise SystemExit("overlap.py compares kernels on a GPU, and there is none here")
    command = [sys.executable, __file__, *sys.argv[1:], "--kernels"]
    overlapping, apart = (
        json.loads(
            subprocess.run([*command, how], stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines()[-1]
        )
        for how in ("overlapping", "apart")
    )
    wrong = 0
    for batch, found in overlapping.items():
        same, again = (each.count(apart[batch][0]) for each in (found, apart[batch]))
        wrong += same < ROUNDS
        print(f"batch {batch}: tokens as one after another in {same} of {ROUNDS} rounds, and these in {again}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
