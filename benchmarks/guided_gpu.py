"""Time per token of a batch on one GPU, with and without grammars, in one run.

    python benchmarks/guided_gpu.py [--model llama-3.1-8b] [--rows 32] [--repeats 3] [--shrink 100 --set device=cpu]

Weights are random, from a config.json alone. The tokenizer is synthetic, with the model's vocabulary size. Prompts
have 512 tokens, answers 129. Times are (T(129) - T(1)) / 128 as in gpu.py. The target: at most 5 % more than without
grammars.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from gpu import CONFIGS, config_of
from guided import GRAMMARS as ENDING
from guided import write_model
from llmcore.api.bridge import LogitsProcessor, SamplingParams
from llmcore_devtools.bench.engine_runs import BenchEngine, measure_latency

TARGET = 1.05
PLAIN = SamplingParams(temperature=1.0)
GRAMMARS: dict[str, dict[str, Any]] = {
    "json": ENDING["json"],
    "grammar": ENDING["grammar"],
    "regex": ENDING["addresses"],
    "counted": {"regex": r"([a-z]{1,12}( [a-z]{1,12}){3,60}\. ){40,}"},
}
"""The grammars of guided.py that an answer of OUTPUT tokens cannot complete."""
PROMPT, OUTPUT = 512, 129


def guided_by(args: dict[str, Any]) -> SamplingParams:
    """Returns PLAIN's sampling, under a grammar."""
    return SamplingParams(temperature=1.0, logits_processors=(LogitsProcessor("guided", args),))


def with_tokenizer(model: str, folder: Path) -> Path:
    """Returns a directory with the model's config and a tokenizer that has as many tokens."""
    config = CONFIGS / model / "config.json"
    write_model(folder, json.loads(config.read_text())["vocab_size"])
    for left in folder.glob("*.safetensors*"):
        left.unlink()
    shutil.copy(config, folder / "config.json")
    return folder


def measure(engine: BenchEngine, options: argparse.Namespace) -> bool:
    """Print a line for each grammar. Returns False if one misses the target."""
    shrink = options.shrink
    prompt, output = max(1, PROMPT // shrink), max(3, OUTPUT // shrink)
    cases = {"no grammar": PLAIN} | {name: guided_by(args) for name, args in GRAMMARS.items()} | {"once more": PLAIN}
    base, good = 0.0, True
    heading = f"batch of {options.rows}"
    print(f"{heading:14} {'ms per token (lowest-highest)':>32} {'of plain':>9}  {'late masks':>10}")
    for name, sampling in cases.items():
        engine.sampling = sampling
        step = measure_latency(engine, options.rows, prompt, output, repeats=options.repeats, warmup=2).step.scaled(
            1e3
        )
        base = base or step.median
        good &= step.median <= TARGET * base
        late = engine.engine._scheduler.totals.late_masks
        print(f"{name:14} {step!s:>32} {step.median / base:9.3f}  {late:10}", flush=True)
    return good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-3.1-8b", help="a name in benchmarks/configs")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a setting of llmcore serve")
    parser.add_argument("--shrink", type=int, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        options.model = str(with_tokenizer(options.model, Path(folder)))
        with BenchEngine(config_of(options)) as engine:
            print(dict(engine.facts.report)["device"])
            return 0 if measure(engine, options) else 1


if __name__ == "__main__":
    sys.exit(main())
