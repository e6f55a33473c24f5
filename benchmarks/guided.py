"""Time per token of a batch, with and without grammars, in one run.

    python benchmarks/guided.py [--model llama-3.1-8b] [--rows 32] [--repeats 3] [--shrink 100 --set device=cpu]

Weights are random, from a config.json alone. The tokenizer is synthetic, with the model's vocabulary size. Prompts
have 512 tokens, answers 129, and no grammar is complete by then. Times are (T(129) - T(1)) / 128 as in gpu.py. A mask
is late if the model's scores are there before it; its row then waits for the next step. Exit code 1 if a grammar costs
more than 5 %.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from gpu import CONFIGS, config_of
from llmcore.api.bridge import LogitsProcessor, SamplingParams
from llmcore_devtools import write_fake_model
from llmcore_devtools.bench.engine_runs import BenchEngine, measure_latency

TARGET = 1.05
PROMPT, OUTPUT = 512, 129
PLAIN = SamplingParams(temperature=1.0)
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 20}, "minItems": 3},
        "born": {"type": "string", "format": "date"},
        "notes": {"type": "array", "items": {"type": "string"}, "minItems": 50},
    },
    "required": ["name", "age", "tags", "born", "notes"],
    "additionalProperties": False,
}
GRAMMARS: dict[str, dict[str, Any]] = {
    "JSON schema": {"json": SCHEMA, "whitespace": False},
    "Lark grammar": {"grammar": 'start: item (", " item){40,}\nitem: /[a-z]+/ "(" (item | /[0-9]+/) ")"'},
    "addresses": {"regex": r"([a-zA-Z0-9._%+-]{1,64}@[a-zA-Z0-9-]{1,63}(\.[a-zA-Z]{2,10}){1,2}\n){50,}"},
    "repeats": {"regex": r"([a-z]{1,12}( [a-z]{1,12}){3,60}\. ){40,}"},
}


def guided_by(args: dict[str, Any]) -> SamplingParams:
    """Returns PLAIN's sampling, under a grammar."""
    return SamplingParams(temperature=1.0, logits_processors=(LogitsProcessor("guided", args),))


def write_tokenizer(directory: Path, size: int) -> None:
    """Write a byte-level tokenizer of `size` tokens, most of them synthetic words."""
    write_fake_model(directory, vocab_size=size)
    description = json.loads((directory / "tokenizer.json").read_text())
    vocabulary = description["model"]["vocab"]
    random = np.random.default_rng(0)
    letters = np.array(list("etaoinshrdlucmfwypvbgkjqxz"))
    chances = np.arange(26, 0, -1) / 351
    taken = set(vocabulary.values()) | {token["id"] for token in description["added_tokens"]}
    free = (token for token in range(size) if token not in taken)
    while len(vocabulary) < size - 8:
        word = "".join(random.choice(letters, random.integers(2, 11), p=chances))
        kind = random.random()
        if kind < 0.45:
            word = "Ġ" + word
        elif kind < 0.55:
            word = word.title()
        elif kind < 0.65:
            word = "".join(random.choice(list('{}[]":,.()0123456789ĊĠ-_='), random.integers(2, 5)))
        elif kind < 0.75:
            word = "".join(random.choice(list("ÃÂäåæçèé¤¥¦§¨©ª«¬®¯°"), random.integers(2, 4)))
        if word not in vocabulary:
            vocabulary[word] = next(free)
    (directory / "tokenizer.json").write_text(json.dumps(description))


def with_tokenizer(model: str, folder: Path) -> Path:
    """Returns a directory with the model's config and a tokenizer that has as many tokens."""
    config = CONFIGS / model / "config.json"
    write_tokenizer(folder, json.loads(config.read_text())["vocab_size"])
    for left in folder.glob("*.safetensors*"):
        left.unlink()
    shutil.copy(config, folder / "config.json")
    return folder


def measure(engine: BenchEngine, options: argparse.Namespace) -> bool:
    """Print a line for each grammar. Returns False if one misses the target."""
    prompt, output = max(1, PROMPT // options.shrink), max(3, OUTPUT // options.shrink)
    cases = {"no grammar": PLAIN} | {name: guided_by(args) for name, args in GRAMMARS.items()} | {"once more": PLAIN}
    base, good, late = 0.0, True, 0
    heading = f"batch of {options.rows}"
    print(f"{heading:14} {'ms per token (lowest-highest)':>32} {'of plain':>9}  {'late masks':>10}")
    for name, sampling in cases.items():
        engine.sampling = sampling
        found = measure_latency(engine, options.rows, prompt, output, repeats=options.repeats, warmup=2)
        step = found.step.scaled(1e3)
        base = base or step.median
        good &= step.median <= TARGET * base
        late, before = engine.engine._scheduler.totals.late_masks, late
        print(f"{name:14} {step!s:>32} {step.median / base:9.3f}  {late - before:10}", flush=True)
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
