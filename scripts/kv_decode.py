"""Attention over quantized KV beside KV in the model's type, on one GPU: checked, timed, one table.

    python scripts/kv_decode.py [--layouts token token-int8 ...] [--batches 64 128 256] [--length 576]

The heads are Llama-3.1-8B's; over latent rows they are DeepSeek-V2-Lite's. First each kernel of a layout is compared
with the torch reference, over the same pool. Then decode over heads is timed in a captured graph, in several launch
configurations, over rows whose slots lie in runs of 16, as the engine gives them.

Each layout has a process of its own. Every line is printed when it is known, and the table is printed last. A step
that takes longer than `--patience` seconds ends its process, after the place in which it hangs has been printed. The
other layouts then have their turn. `--seconds` limits the whole.
"""

from __future__ import annotations

import argparse
import faulthandler
import importlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from llmcore.api.models import AttnSpec
from llmcore.api.specs import OpContext, OpSpec
from llmcore.config import Config
from llmcore.engine.model import pick_device
from llmcore.ops import Shape, drawing, made
from llmcore.ops.attention import shape_of
from llmcore.registry.loader import build_registry, select
from llmcore.registry.resolve import candidates_for, resolve
from llmcore_devtools.kernels.attention_cases import AttnCase, case
from llmcore_devtools.kernels.attention_stored import over_its_layout, stored
from llmcore_devtools.kernels.bench import seconds_per_call
from llmcore_devtools.kernels.compare import check, compare, planned
from llmcore_triton.attention import gqa_flashdecoding
from llmcore_triton.attention.listed import Config as Launch
from llmcore_triton.specs.layouts import LATENT, QUANTIZED, QUANTIZED_LATENT, TOKEN

DECODE = "attn.gqa.decode"
_HEADS = shape_of(AttnSpec(heads=32, kv_heads=8, key_size=128, value_size=128, scale=128**-0.5))
_WRITTEN = {"heads": 32, "kv_heads": 8, "size": 128, "rotated": 128}
LLAMA: Mapping[str, Shape] = {
    **dict.fromkeys(("rope_kv_write", "qk_norm_rope_kv_write"), _WRITTEN),
    **dict.fromkeys((DECODE, "attn.gqa.mixed", "attn.gqa.prefill"), _HEADS),
}
_ROWS = shape_of(AttnSpec(heads=16, kv_heads=1, key_size=576, value_size=512, scale=192**-0.5))
DEEPSEEK: Mapping[str, Shape] = {
    "latent_rope_kv_write": {"heads": 16, "size": 192, "latent": 512, "rotated": 64},
    **dict.fromkeys(("attn.mla.decode", "attn.mla.mixed", "attn.mla.prefill"), _ROWS),
}
"""Op -> its shape."""

LAYERS = 32
RUN = 16
"""Neighbouring slots that the engine gives to a row at a time."""

COLD = 192 << 20
"""Bytes of KV that the calls read before they read the same again."""

FIELDS = ("block_n", "warps", "stages", "per_processor", "registers")
CONFIGS = (
    *((32, 1, 3, 16, 128), (64, 2, 3, 8, 128), (32, 2, 3, 8, 128), (64, 1, 3, 8, 0), (32, 1, 5, 11, 128)),
    *((64, 4, 3, 4, 128), (32, 1, 3, 12, 168), (64, 1, 3, 11, 168), (64, 4, 3, 5, 96), (128, 4, 3, 4, 128)),
    *((32, 2, 5, 8, 128), (64, 2, 5, 5, 168)),
)
"""FIELDS of launch configurations. Likely ones come first."""

ENDING = 20.0
"""Seconds that a process gets to end when its time is up."""


class Layout:
    """One layout on one GPU. `results` gets a line of JSON for each step. `patience`: the most seconds of a step."""

    def __init__(self, name: str, results: Path, patience: float) -> None:
        self.name, self._results, self._patience = name, results, patience
        self.registry = build_registry(Config(discovered=select(None).plugins))
        self.device = pick_device(self.registry, "auto")
        self.where = self.device.torch_device

    def step(self, what: str, work: Callable[[], dict[str, Any]]) -> bool:
        """Do one step, and print and note what it found. Returns False if it failed."""
        started = time.monotonic()
        faulthandler.dump_traceback_later(self._patience, exit=True)
        print(f"{self.name}, {what}: ", end="", flush=True)
        try:
            found = work()
        except Exception as failure:  # noqa: BLE001 - the other steps go on
            found = {"failed": f"{type(failure).__name__}: {next(iter(str(failure).strip().splitlines()), '')}"}
        faulthandler.cancel_dump_traceback_later()
        said = [
            f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}" for name, value in found.items()
        ]
        print(f"{', '.join(said)} ({time.monotonic() - started:.1f} s)", flush=True)
        with self._results.open("a") as file:
            file.write(json.dumps({"layout": self.name, "what": what, **found}) + "\n")
        return "failed" not in found

    def context(self, op: str, shape: Shape, tokens: int) -> OpContext:
        """The context of an op in a step of `tokens` tokens."""
        bucket = sum(tokens > most for most in (1, 16, 64, 256))
        return OpContext(
            op=op, device=self.device.info, dtype="bf16", layout=self.name, bucket=bucket, shape=dict(shape)
        )

    def over(self, context: OpContext) -> tuple[Any, OpContext]:
        """See `over_its_layout`."""
        module = importlib.import_module(self.registry.find(OpSpec, context.op).module)
        return over_its_layout(self.registry, module, context)

    def checks(self) -> None:
        """Compare every kernel that an engine takes with its reference, on the op's own samples."""
        latent = self.name == LATENT or self.name in QUANTIZED_LATENT
        for op, shape in (DEEPSEEK if latent else LLAMA).items():
            for tokens in (1, 64):
                self.step(f"{op}, up to {tokens} tokens", partial(self._checked, op, shape, tokens))

    def _checked(self, op: str, shape: Shape, tokens: int) -> dict[str, Any]:
        context = self.context(op, shape, tokens)
        kernel = resolve(candidates_for(self.registry, op), context, {}, self.registry.order).chosen
        samples, context = self.over(context)
        return {"samples": check(samples, made(kernel, context), context, self.where), "kernel": kernel.name}

    def cases(self, batches: Sequence[int], length: int) -> Iterator[AttnCase]:
        """Cases of decode, if the kernel's own configuration computes them right. The first case has a long row."""
        for lengths in ([16 * length, *[length] * 15], *([length] * batch for batch in batches)):
            found: list[AttnCase] = []
            if self.step(f"decode of {len(lengths)} rows", partial(self._held, lengths, found)):
                yield from found

    def _held(self, lengths: Sequence[int], found: list[AttnCase]) -> dict[str, Any]:
        context = self.context(DECODE, LLAMA[DECODE], len(lengths))
        samples, context = self.over(context)
        with drawing(0, self.where):
            given = case(replace(context, layout="token"), [1] * len(lengths), lengths)
        if self.name != "token":
            given = stored(given, samples.layout)
        error = compare(samples, gqa_flashdecoding.make(context), context, (given,), self.where, long=True)
        found.append(in_runs(given))
        return {"share of the allowed error": error}

    def times(self, cases: Sequence[AttnCase], end: float) -> None:
        """Time decode in its own configuration, then in others until `end`."""
        for values in ((), *CONFIGS):
            for given in cases:
                if values and time.monotonic() > end:
                    return
                self.step(f"{len(given.q)} rows", partial(self._timed, given, values))

    def _timed(self, given: AttnCase, values: Sequence[int]) -> dict[str, Any]:
        context = self.context(DECODE, LLAMA[DECODE], len(given.q))
        config = asdict(Launch()) | dict(zip(FIELDS, values, strict=True)) if values else {}
        kernel = gqa_flashdecoding.make_with(context, config or asdict(gqa_flashdecoding.make(context).config))
        moved, meta, out = bytes_of(given), dict(given.meta), given.out()
        planned(kernel, given, meta)
        pools = [given.kv, *(tuple(pool.clone() for pool in given.kv) for _ in range(COLD // moved))]
        calls = [partial(kernel.run, given.q, given.k_new, given.v_new, kv, meta, out) for kv in pools]
        seconds, _ = seconds_per_call(self.device, calls, 3e-3)
        chosen = [getattr(kernel.config, field) for field in FIELDS]
        return {"us": 1e6 * seconds, "GB/s": moved / seconds / 1e9, "config": chosen, "own": not values}


def bytes_of(given: AttnCase) -> int:
    """Bytes of the rows' KV."""
    slots = len(given.kv[0])
    pools = [pool for pool in given.kv if len(pool) == slots]
    return sum(pool[0].nbytes for pool in pools) * int(given.rows.kv_len.sum())


def in_runs(given: AttnCase) -> AttnCase:
    """The same rows over slots that lie in runs of RUN."""
    table, slots = given.meta["table"], len(given.kv[0])
    runs = torch.randperm(slots // RUN, device=table.device)
    every = (runs[:, None] * RUN + torch.arange(RUN, device=table.device)).flatten().int()
    width = -(-int(given.rows.kv_len.max()) // RUN) * RUN
    rows = every[: len(every) // width * width].view(-1, width)[:, : table.shape[1]]
    laid = torch.zeros_like(table)
    for row, request in enumerate(given.meta["request"].tolist()):
        laid[request, : rows.shape[1]] = rows[row % len(rows)]
    return replace(given, meta={**given.meta, "table": laid})


@torch.inference_mode()
def one_layout(options: argparse.Namespace) -> None:
    """Check and time one layout in this process."""
    end = time.monotonic() + options.seconds
    layout = Layout(options.layouts[0], options.results, options.patience)
    layout.checks()
    if layout.name in (TOKEN, *QUANTIZED):
        layout.times(list(layout.cases(options.batches, options.length)), end)


def shown(found: Sequence[dict[str, Any]]) -> None:
    """Print what failed, and a line for each layout and batch."""
    for one in found:
        if "failed" in one:
            print(f"FAILED {one['layout']}, {one['what']}: {one['failed']}")
    print(
        f"{'LAYOUT':18}{'DECODE':>10}{'OWN us':>9}{'BEST us':>9}{'GB/s':>7}{'x token':>9}{'ms/step':>9}  BEST {FIELDS}"
    )
    timed: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for one in found:
        if "us" in one:
            timed.setdefault((one["layout"], one["what"]), []).append(one)
    best = {key: min(every, key=lambda one: one["us"]) for key, every in timed.items()}
    for (layout, what), one in best.items():
        own = next((each["us"] for each in timed[layout, what] if each["own"]), float("nan"))
        plain = best.get((TOKEN, what), {"us": float("nan")})["us"]
        print(
            f"{layout:18}{what:>10}{own:9.1f}{one['us']:9.1f}{one['GB/s']:7.0f}{one['us'] / plain:9.2f}"
            f"{LAYERS * one['us'] / 1e3:9.2f}  {one['config']}"
        )


def in_processes(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Check and time each layout in a process of its own. Returns what they found."""
    end = time.monotonic() + options.seconds
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results"
        results.touch()
        for number, layout in enumerate(options.layouts):
            seconds = (end - time.monotonic()) / (len(options.layouts) - number)
            own = [f"--layouts={layout}", f"--seconds={seconds:.0f}", f"--results={results}"]
            process = subprocess.Popen([sys.executable, __file__, *sys.argv[1:], *own])
            try:
                code = process.wait(seconds + options.patience)
            except subprocess.TimeoutExpired:
                process.kill()
                code = None
                with suppress(subprocess.TimeoutExpired):
                    # a process in a driver's call may outlive its end
                    process.wait(ENDING)
            if code != 0:
                print(f"\n{layout}: ended early ({'too slow' if code is None else f'exit code {code}'})", flush=True)
        return [json.loads(line) for line in results.read_text().splitlines()]


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layouts", nargs="+", default=["token", "token-int8", "token-fp8", "token-int4"])
    parser.add_argument("--batches", nargs="+", type=int, default=[64, 128, 256])
    parser.add_argument("--length", type=int, default=576)
    parser.add_argument("--seconds", type=float, default=240.0)
    parser.add_argument("--patience", type=float, default=40.0)
    parser.add_argument("--results", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.results is not None:
        one_layout(options)
    else:
        shown(in_processes(options))


if __name__ == "__main__":
    main()
