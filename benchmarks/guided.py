"""The host's cost of guided rows per step: masks, acceptance, and the part that is in series with the forward.

    OMP_NUM_THREADS=1 python benchmarks/guided.py [--rows 32] [--vocabulary 150000] [--forward-ms 5] [--steps 150]

The tokenizer is synthetic. First each grammar runs alone, in one thread: compiling, masks, acceptance. Then the real
engine runs on a simulated device. It is one step ahead, and its forward ends after `--forward-ms` whatever the host
does. The host's time between the end of a forward and the launch of its draw is in series, with `--rows` guided rows.
Masks of a regular expression are kept. Each is shown for the first request that needs it, and for a later one
("again").
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from llmcore.api import ProcessorContext
from llmcore.api.processors import LogitsProcessorSpec
from llmcore.engine.llm import LLM
from llmcore.engine.model_runner import ModelRunner
from llmcore.engine.sampler import RowSampler
from llmcore.registry.loader import load
from llmcore.sched.processors import ChoiceProcessors
from llmcore.text.tokenizer import load_tokenizer
from llmcore_devtools import registry_of, write_fake_model

DEVICE = Path(__file__).parent / "timed_device.py"
TARGET_MS = 3.0
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
    "json": {"json": SCHEMA, "whitespace": False},
    "json_object": {"json_object": True},
    "words": {"regex": r"\w+( \w+){5,20}"},
    "addresses": {"regex": r"([a-zA-Z0-9._%+-]{1,64}@[a-zA-Z0-9-]{1,63}(\.[a-zA-Z]{2,10}){1,2}\n){50,}"},
    "numbers": {"regex": r"(\+\d{1,3} \(\d{3}\) \d{3}-\d{4}, \d{4}-(0[1-9]|1[0-2])-(0[1-9]|[12]\d|3[01])\n){50,}"},
    "URLs": {"regex": r"(https?://[a-z0-9-]{1,63}(\.[a-z0-9-]{1,63}){1,3}(/[A-Za-z0-9._~%-]{0,40}){0,8}\n){50,}"},
    "list": {"regex": r"(\d{1,3}\. [A-Z][^\n.]{5,100}\.\n){50,}"},
    "counted": {"regex": r"([a-z]{1,12}( [a-z]{1,12}){3,60}\. ){9,}"},
    "grammar": {"grammar": 'start: item (", " item){40,}\nitem: /[a-z]+/ "(" (item | /[0-9]+/) ")"'},
}


def timed_device() -> Any:
    """Returns the class of the simulated device. Its plugin must be loaded."""
    return sys.modules["llmcore_file_timed_device"].TimedCPU


class Meter:
    """Milliseconds of the engine's thread and of the others, step by step."""

    def __init__(self) -> None:
        self.accept: list[float] = []
        self.masks: list[float] = []
        self.wall: list[float] = []
        self.series: list[float] = []
        self.pack: list[float] = []
        self._accepted = self._computed = self._packed = 0.0
        self._from = self._until = 0.0

    def install(self) -> None:
        """Measure from now on."""
        launch, draw, pack = ModelRunner._launch_forward, ModelRunner.draw, RowSampler.pack
        accept, prepare = ChoiceProcessors.accept, ChoiceProcessors._prepare
        meter = self

        def launched(runner: ModelRunner, *args: Any) -> Any:
            device = timed_device()
            device.launching = True
            try:
                return launch(runner, *args)
            finally:
                device.launching = False

        def drawn(runner: ModelRunner, step: Any, steered: Any) -> Any:
            over = step.event.at
            outcome = draw(runner, step, steered)
            meter.accept.append(meter._accepted)
            meter.masks.append(meter._computed)
            meter.pack.append(meter._packed)
            meter.wall.append((meter._until - meter._from) * 1e3 if meter._from else 0.0)
            meter.series.append(max(0.0, meter._ready - over) * 1e3)
            meter._accepted = meter._computed = meter._packed = meter._from = 0.0
            return outcome

        def packed(sampler: RowSampler, *args: Any) -> Any:
            began = time.perf_counter()
            found = pack(sampler, *args)
            meter._ready = time.perf_counter()
            meter._packed += (meter._ready - began) * 1e3
            return found

        def accepted(bound: ChoiceProcessors, token: int) -> bool:
            began = time.perf_counter()
            meter._from = meter._from or began
            ended = accept(bound, token)
            meter._accepted += (time.perf_counter() - began) * 1e3
            return ended

        def prepared(bound: ChoiceProcessors) -> None:
            began = time.thread_time()
            prepare(bound)
            meter._computed += (time.thread_time() - began) * 1e3
            meter._until = time.perf_counter()

        changed: list[tuple[type, str, Any]] = [
            (ModelRunner, "_launch_forward", launched),
            (ModelRunner, "draw", drawn),
            (RowSampler, "pack", packed),
            (ChoiceProcessors, "accept", accepted),
            (ChoiceProcessors, "_prepare", prepared),
        ]
        for owner, name, function in changed:
            setattr(owner, name, function)

    _ready = 0.0


def write_model(directory: Path, size: int) -> Path:
    """Writes a fake model with a byte-level vocabulary of `size`, most of it synthetic words."""
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
    return directory


def alone(directory: Path, size: int) -> None:
    """Print each grammar's times in one thread."""
    tokenizer = load_tokenizer(directory)
    context = ProcessorContext(size, tuple(tokenizer.eos_ids), cache(lambda: tokenizer))
    spec = next(spec for spec, _ in registry_of("guided").specs(LogitsProcessorSpec))
    make = load(spec.make)
    began = time.perf_counter()
    load(spec.warm or "")(context)
    print(f"vocabulary of {size} made ready in {time.perf_counter() - began:.2f} s")
    print(f"{'':16} {'compile':>9} {'mask':>18} {'accept':>9}\n{'':16} {'ms':>9} {'us, mean / p95':>18} {'us':>9}")
    random = np.random.default_rng(1)
    for name, args in GRAMMARS.items():
        began = time.perf_counter()
        start = make(dict(args), context)
        compiled = (time.perf_counter() - began) * 1e3
        masks, accepts = [], []
        for _ in range(5):
            processor = start(np.zeros(1, np.int32))
            for _ in range(100):
                began = time.perf_counter()
                words = processor.mask()
                masks.append((time.perf_counter() - began) * 1e6)
                token = int(random.choice(np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))))
                began = time.perf_counter()
                processor.accept(token)
                accepts.append((time.perf_counter() - began) * 1e6)
                if processor.finished():
                    break
        spread = f"{np.mean(masks):.0f} / {np.quantile(masks, 0.95):.0f}"
        print(f"{name:16} {compiled:9.1f} {spread:>18} {np.mean(accepts):9.0f}")


def in_steps(directory: Path, rows: int, steps: int, forward_ms: float) -> None:
    """Print the times of the real engine on the simulated device."""
    meter = Meter()
    meter.install()
    settings: dict[str, Any] = {"device": "cpu-timed", "max_total_token_num": 40000, "running_max_req_size": rows}
    with LLM(directory, plugins=["guided", str(DEVICE)], **settings) as llm:
        timed_device().seconds = forward_ms / 1e3
        print(f"\nper step of {rows} rows, forward {forward_ms:g} ms; ms, mean / p95")
        print(f"{'':16} {'accept':>14} {'masks: cpu':>14} {'masks: wall':>14} {'pack':>14} {'in series':>14}  late")
        # a server has the vocabulary ready before the first request
        one = [{"name": "guided", "args": GRAMMARS["json_object"]}]
        llm.generate([[1, 2, 3]], max_new_tokens=2, logits_processors=one, ignore_eos=True)
        again = [(f"{name} again", args) for name, args in GRAMMARS.items() if "regex" in args]
        for name, args in [*GRAMMARS.items(), *again]:
            asked = {"logits_processors": [{"name": "guided", "args": args}], "ignore_eos": True, "temperature": 1.0}

            def ask(i: int, asked: dict[str, Any] = asked) -> None:
                llm.generate([[i + 1, 2, 3]], max_new_tokens=steps, seed=i, **asked)

            for column in (meter.accept, meter.masks, meter.wall, meter.pack, meter.series):
                column.clear()
            late = llm._bridge._engine._scheduler.totals.late_masks
            with ThreadPoolExecutor(rows) as pool:
                list(pool.map(ask, range(rows)))
            late = llm._bridge._engine._scheduler.totals.late_masks - late
            # the first steps have prompts that come one by one, the last ones have fewer rows
            middle = slice(len(meter.accept) // 5, -len(meter.accept) // 3)
            columns = (meter.accept, meter.masks, meter.wall, meter.pack, meter.series)
            shown = [f"{np.mean(c[middle]):.2f} / {np.quantile(c[middle], 0.95):.2f}" for c in columns]
            print(f"{name:16} " + " ".join(f"{text:>14}" for text in shown) + f"  {late}")
    print(f"\ntarget: accept, masks and pack at most {TARGET_MS:g} ms a step, none in series")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--vocabulary", type=int, default=150_000)
    parser.add_argument("--forward-ms", type=float, default=5.0)
    parser.add_argument("--steps", type=int, default=150)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        directory = write_model(Path(folder), options.vocabulary)
        alone(directory, options.vocabulary)
        in_steps(directory, options.rows, options.steps, options.forward_ms)


if __name__ == "__main__":
    main()
