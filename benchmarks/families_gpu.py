"""Every family on one GPU, in one table. Exit code 1 if a limit is exceeded.

    python benchmarks/families_gpu.py --check --speed [--only gemma2 olmo2 ...] [--json FILE]

`--check` runs small random models of every family (families_check.py). It compares the relative L2 error of bf16
logits, against transformers in f32 on the same weights, with that of transformers' own bf16 (at most 1.1 of it). It
does so for whole prompts, in chunks and decoding. Greedy ids in f32 must be transformers'.

`--speed` runs real configs of dense families with random weights, cut to --layers layers with the whole embedding and
head. It prints the share of a decode step that its ops' bytes and flops take at this run's ceilings. Llama's, cut in
the same way, is printed beside it (at least 0.85 of it).

`--device cpu --shrink 16` tries the script itself: lengths, batches, vocabularies and MLPs are divided.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import queue
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import families_check
import torch
from gpu import CONFIGS, config_of
from gpu_floor import model_build
from llmcore.engine.model import pick_device
from llmcore_devtools.bench.engine_runs import BenchEngine
from llmcore_devtools.bench.figures import machine, versions
from llmcore_devtools.decode_floor import decode_floor, seconds
from llmcore_devtools.loaded_model import registry_for_tests

DENSE = {
    "llama": "llama-3.1-8b",
    "qwen2": "qwen2.5-7b",
    "qwen3": "qwen3-8b",
    "mistral": "mistral-7b-v0.3",
    "gemma2": "gemma-2-9b",
    "gemma3": "gemma-3-4b-text",
    "phi3": "phi-3-mini-4k",
    "olmo2": "olmo-2-7b",
    "granite": "granite-3.1-8b",
    "starcoder2": "starcoder2-7b",
    "stablelm": "stablelm-3b-4e1t",
    "cohere": "aya-23-8b",
}
"""Family -> config. Llama is what the others are compared with, and comes first."""

BATCHES, PROMPT, STEPS, WINDOWS = (1, 64, 256), 512, 64, 4
ANSWER = 3 * STEPS + 8
"""Tokens of an answer at most: some while prompts are computed, STEPS that do not count, and STEPS that do."""

SHARE_LIMIT = 0.85
"""Limit, as a factor of Llama's share of the roofline."""

ASSUMED = (1e10, 1e11)
"""Bytes and flops per second without a GPU. The shares then mean nothing."""


@dataclass(frozen=True)
class Step:
    """A family's decode step at one batch size. `share`: of the roofline. `of_llama`: that over Llama's."""

    family: str
    config: str
    batch: int
    kv_len: int
    milliseconds: float
    gigabytes: float
    share: float
    of_llama: float = 0.0

    @property
    def good(self) -> bool:
        """True if the step is within the limit."""
        return self.of_llama >= SHARE_LIMIT

    def text(self) -> str:
        """Returns a line of the table."""
        return (
            f"{self.config:<18} batch {self.batch:>3} {self.milliseconds:>9.3f} ms {self.gigabytes:>7.2f} GB  "
            f"roofline {self.share:.3f}, of Llama's {self.of_llama:.3f} {'ok' if self.good else 'MISSED'}"
        )


def checks(names: Sequence[str], options: argparse.Namespace) -> Iterator[families_check.Found]:
    """Yields every family's results, from several processes: most of the time goes into compiling kernels."""
    jobs = min(options.jobs, len(families_check.cases(names)))
    if jobs == 1:
        yield from share(names, options, 0, 1)
        return
    command = [sys.executable, __file__, f"--device={options.device}", f"--shrink={options.shrink}"]
    running = [
        subprocess.Popen(
            [*command, f"--share={index}/{jobs}", "--only", *names], stdout=subprocess.PIPE, text=True, bufsize=1
        )
        for index in range(jobs)
    ]
    lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()

    def read(process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            lines.put(line)
        lines.put(None)

    for process in running:
        threading.Thread(target=read, args=(process,), daemon=True).start()
    ended = 0
    while ended < jobs:
        line = lines.get()
        if line is None:
            ended += 1
        else:
            yield families_check.Found(**json.loads(line))
    if any(process.wait() for process in running):
        raise SystemExit("a process of --check failed; its error is above")


def share(names: Sequence[str], options: argparse.Namespace, first: int, every: int) -> Iterator[families_check.Found]:
    """Yields results of every `every`-th config, in this process."""
    for name, index in families_check.cases(names)[first::every]:
        try:
            yield families_check.check(name, index, options.device, options.shrink)
        except Exception:  # noqa: BLE001 - the other families are worth knowing
            print(f"{name} {index}: FAILED\n{traceback.format_exc()}", file=sys.stderr, flush=True)
            yield families_check.Found(name, index, math.nan, {"failed": math.inf}, 0, 0, None, (), 0.0)


def ceilings() -> tuple[float, float]:
    """Returns the bytes and flops per second of this run."""
    if not torch.cuda.is_available():
        return ASSUMED
    import gpu_ceilings

    with torch.inference_mode():
        found = gpu_ceilings.copy() * 1e12, gpu_ceilings.matmul() * 1e12
    torch.cuda.empty_cache()
    return found


def speeds(names: Sequence[str], options: argparse.Namespace) -> Iterator[Step]:
    """Yields every dense family's decode steps, Llama's first."""
    copy, matmul = ceilings()
    print(f"ceilings: {copy / 1e12:.2f} TB/s copied, {matmul / 1e12:.0f} TFLOP/s", flush=True)
    llama: dict[int, float] = {}
    for family in dict.fromkeys(("llama", *names)):
        began = time.perf_counter()
        try:
            found = list(steps(family, options, copy, matmul))
        except Exception:  # noqa: BLE001 - the other families are worth knowing
            print(f"{DENSE[family]}: FAILED\n{traceback.format_exc()}", flush=True)
            found = [Step(family, DENSE[family], batch, 0, math.nan, 0.0, 0.0) for batch in options.batches]
        release()
        for step in found:
            yield replace(step, of_llama=step.share / llama.setdefault(step.batch, step.share or math.nan))
        left = torch.cuda.memory_allocated() / 1e9 if torch.cuda.is_available() else 0.0
        print(f"({family}: {time.perf_counter() - began:.0f} s; {left:.1f} GB left behind)", flush=True)


def steps(family: str, options: argparse.Namespace, copy: float, matmul: float) -> Iterator[Step]:
    """Yields one family's steps, not yet compared."""
    with tempfile.TemporaryDirectory() as folder:
        cut(DENSE[family], options.layers, options.shrink, Path(folder))
        config = config_of(argparse.Namespace(model=folder, set=settings(options)))
        build = model_build(config, pick_device(registry_for_tests(), options.device).info)
        with BenchEngine(config) as engine:
            timed = [decode(engine, batch, options.shrink) for batch in options.batches]
    for batch, (length, step) in zip(options.batches, timed, strict=True):
        floor = decode_floor(build, max(1, batch // options.shrink), length)
        moved = sum(part.moved for part in floor) / 1e9
        share = seconds(floor, copy, matmul) / step
        yield Step(family, DENSE[family], batch, length, step * 1e3, moved, share)


def settings(options: argparse.Namespace) -> list[str]:
    """Returns the engine's settings, with as much KV as the largest batch needs, whatever earlier engines left."""
    length = PROMPT + ANSWER
    tokens = max(1, max(options.batches) // options.shrink) * (length + 32)
    return [
        f"device={options.device}",
        f"max_total_token_num={tokens}",
        f"max_req_total_len={length}",
        *options.set,
    ]


def cut(name: str, layers: int, shrink: int, folder: Path) -> None:
    """Write the config of `name` with `layers` layers."""
    config = json.loads((CONFIGS / name / "config.json").read_text())
    config["num_hidden_layers"] = min(layers, config["num_hidden_layers"])
    config["vocab_size"] //= shrink
    config["intermediate_size"] //= shrink
    # ids of special tokens may exceed a smaller vocabulary
    special = ("bos_token_id", "eos_token_id", "pad_token_id")
    config.update({key: min(config[key], config["vocab_size"] - 1) for key in special if key in config})
    (folder / "config.json").write_text(json.dumps(config))


def decode(engine: BenchEngine, batch: int, shrink: int) -> tuple[int, float]:
    """(tokens that a row holds, seconds of a step in which all rows decode). As many steps before do not count."""
    batch, prompt, steps = (max(1, n // shrink) for n in (batch, PROMPT, STEPS))
    # the first rows answer while the others' prompts are computed
    output = min(2 * steps + 8 + batch * prompt // 2048, ANSWER)
    for _ in range(batch):
        engine.engine.submit(engine.request(prompt, output), 0)
    ends: list[tuple[float, int]] = []
    made = 0
    while not engine.engine.idle:
        for events in engine.engine.step():
            if 0 in events:
                made += len(events[0].tokens)
                if len(events[0].tokens) == batch:
                    ends.append((time.perf_counter(), made))
    if len(ends) < 2 * WINDOWS:
        raise SystemExit(f"batch {batch}: all rows decoded in {len(ends)} steps only")
    ends = ends[len(ends) // 2 :]
    size = (len(ends) - 1) // WINDOWS
    times = [(ends[i + size][0] - ends[i][0]) / size for i in range(0, size * WINDOWS, size)]
    return prompt + ends[len(ends) // 2][1] // batch, statistics.median(times)


def release() -> None:
    """Free the memory of an engine that is gone. Engines freeze objects out of the garbage collector's sight."""
    gc.unfreeze()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--speed", action="store_true")
    parser.add_argument("--only", nargs="+", choices=families_check.FAMILIES, default=list(families_check.FAMILIES))
    parser.add_argument("--batches", nargs="+", type=int, default=BATCHES)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--jobs", type=int, help="processes of --check (default: 8 on a GPU, else 1)")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a setting of llmcore serve")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--shrink", type=int, default=1)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--share", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    options = parse()
    if options.share:
        first, every = map(int, options.share.split("/"))
        for found in share(options.only, options, first, every):
            print(json.dumps(asdict(found)), flush=True)
        return 0
    registry = registry_for_tests()
    device = pick_device(registry, options.device)
    options.device = device.info.type
    options.jobs = options.jobs or (8 if device.measured else 1)
    print(f"{device.info.type} {device.info.name}, torch {torch.__version__}", flush=True)
    lines: list[families_check.Found | Step] = []
    began = time.perf_counter()
    for asked, work in ((options.check, checks), (options.speed, speeds)):
        if not asked:
            continue
        names = options.only if work is checks else [name for name in options.only if name in DENSE]
        for line in work(names, options):
            print(line.text(), flush=True)
            lines.append(line)
        print(f"({work.__name__}: {time.perf_counter() - began:.0f} s)", flush=True)
        began = time.perf_counter()
    missed = [line for line in lines if not line.good]
    print(f"{len(lines) - len(missed)} of {len(lines)} lines within their limits")
    print("\n".join(line.text() for line in missed), flush=True)
    if options.json:
        kinds = {"check": families_check.Found, "speed": Step}
        content = {
            "machine": machine(),
            "versions": versions(registry),
            **{name: [asdict(line) for line in lines if isinstance(line, kind)] for name, kind in kinds.items()},
        }
        options.json.write_text(json.dumps(content, indent=2) + "\n")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
