"""Decode attention over quantized KV beside KV in the model's type, on one GPU: checked, timed, one table.

    python scripts/kv_decode.py [--layouts token token-int8 ...] [--batches 64 128 256] [--length 576]

The heads are Llama-3.1-8B's. Each kernel is compared with the torch reference, which reads the same pool. Then it is
timed in a captured graph, in several launch configurations, over rows whose slots lie in runs of 16, as the engine
gives them. The table has the best configuration, and all of them follow. `--seconds` limits the whole.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
from llmcore.api.models import AttnSpec
from llmcore.api.protocols import Device
from llmcore.api.specs import OpContext
from llmcore.config import Config
from llmcore.engine.model import pick_device
from llmcore.ops import attn_gqa_decode, drawing
from llmcore.ops.attention import shape_of
from llmcore.registry.loader import build_registry, select
from llmcore.registry.registry import Registry
from llmcore_devtools.kernels.attention_cases import AttnCase, case
from llmcore_devtools.kernels.attention_stored import over_its_layout, stored
from llmcore_devtools.kernels.bench import seconds_per_call
from llmcore_devtools.kernels.compare import compare, planned
from llmcore_triton.attention import gqa_flashdecoding
from llmcore_triton.attention.listed import Config as Launch

LLAMA = AttnSpec(heads=32, kv_heads=8, key_size=128, value_size=128, scale=128**-0.5)
LAYERS = 32
RUN = 16
"""Neighbouring slots that the engine gives to a row at a time."""

COLD = 192 << 20
"""Bytes of KV that the calls read before they read the same again."""

FIELDS = ("block_n", "warps", "stages", "per_processor", "registers")
CONFIGS = (
    *((64, 4, 3, 4, 0), (128, 4, 3, 3, 168), (64, 4, 3, 4, 128), (128, 4, 3, 3, 0), (64, 4, 5, 4, 128)),
    *((128, 4, 3, 3, 128), (128, 8, 3, 3, 0), (128, 4, 5, 3, 168), (64, 4, 5, 4, 0), (32, 4, 5, 4, 128)),
)
"""FIELDS of launch configurations. Likely ones come first."""


@dataclass
class Case:
    """One layout and batch. `us`: configuration -> microseconds."""

    layout: str
    given: AttnCase
    error: float
    us: dict[tuple[int, ...], float]

    @property
    def moved(self) -> int:
        """Bytes of KV of the rows."""
        slots = len(self.given.kv[0])
        pools = [pool for pool in self.given.kv if len(pool) == slots]
        return sum(pool[0].nbytes for pool in pools) * int(self.given.rows.kv_len.sum())


def context_of(device: Device, layout: str, batch: int) -> OpContext:
    """The context of a decode step of `batch` rows."""
    bucket = sum(batch > most for most in (1, 16, 64, 256))
    base = OpContext(op="attn.gqa.decode", device=device.info, dtype="bf16", layout=layout, bucket=bucket)
    return replace(base, shape=shape_of(LLAMA))


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


def timed(device: Device, kernel: Any, given: AttnCase, copies: Sequence[tuple[torch.Tensor, ...]]) -> float:
    """Microseconds of one call."""
    meta, out = dict(given.meta), given.out()
    planned(kernel, given, meta)
    calls = [partial(kernel.run, given.q, given.k_new, given.v_new, kv, meta, out) for kv in copies]
    seconds, _ = seconds_per_call(device, calls, 3e-3)
    return 1e6 * seconds


@torch.inference_mode()
def measured(
    registry: Registry, device: Device, layout: str, batches: Sequence[int], length: int, end: float
) -> list[Case]:
    """Check and time one layout: first all batches in the kernel's own configuration, then in others."""
    where = device.torch_device
    found: list[Case] = []
    for batch in batches:
        context = context_of(device, layout, batch)
        with drawing(0, where):
            given = case(replace(context, layout="token"), [1] * batch, [length] * batch)
        samples, context = over_its_layout(registry, attn_gqa_decode, context)
        given = stored(given, samples.layout) if layout != "token" else given
        kernel = gqa_flashdecoding.make(context)
        try:
            error = compare(samples, kernel, context, (given,), where, long=True)
        except AssertionError as wrong:
            print(f"{layout}, {batch} is WRONG: {wrong}", flush=True)
            error = float("inf")
        found.append(Case(layout, in_runs(given), error, {}))
    configs = [{**asdict(gqa_flashdecoding.make(context).config)}]
    configs += [{**asdict(Launch()), **dict(zip(FIELDS, values, strict=True))} for values in CONFIGS]
    for config in configs:
        for one in found:
            if time.monotonic() > end and one.us:
                break
            name = tuple(config[field] for field in FIELDS)
            context = context_of(device, layout, len(one.given.q))
            copies = [one.given.kv]
            copies += [tuple(pool.clone() for pool in one.given.kv) for _ in range(COLD // one.moved)]
            try:
                kernel = gqa_flashdecoding.make_with(context, config)
                one.us.setdefault(name, timed(device, kernel, one.given, copies))
            except Exception as failure:  # noqa: BLE001 - what does not fit the GPU is not the best
                print(f"{layout}, {name}: {type(failure).__name__}: {str(failure).splitlines()[:1]}", flush=True)
    return found


def shown(cases: Sequence[Case]) -> None:
    """Print the table, and then every configuration."""
    plain = {len(one.given.q): min(one.us.values()) for one in cases if one.layout == "token"}
    titles = f"{'CHECK':>8}{'OWN us':>9}{'BEST us':>9}{'GB/s':>7}{'x token':>9}{'ms/step':>9}"
    print(f"{'LAYOUT':18}{'BATCH':>6}{titles}  BEST")
    for one in cases:
        batch, best = len(one.given.q), min(one.us, key=lambda name: one.us[name])
        us, own = one.us[best], next(iter(one.us.values()))
        share = us / plain[batch] if batch in plain else float("nan")
        print(
            f"{one.layout:18}{batch:6}{one.error:8.3f}{own:9.1f}{us:9.1f}{one.moved / us / 1e3:7.0f}{share:9.2f}"
            f"{LAYERS * us / 1e3:9.2f}  {best}"
        )
    print(f"CHECK: largest error as a share of the allowed one. OWN: the kernel's own configuration. {FIELDS}")
    for one in cases:
        every = ", ".join(f"{name}: {us:.1f}" for name, us in sorted(one.us.items(), key=lambda pair: pair[1]))
        print(f"{one.layout}, {len(one.given.q)}: {every}")


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layouts", nargs="+", default=["token", "token-int8", "token-fp8", "token-int4"])
    parser.add_argument("--batches", nargs="+", type=int, default=[64, 128, 256])
    parser.add_argument("--length", type=int, default=576)
    parser.add_argument("--seconds", type=float, default=170.0)
    options = parser.parse_args()
    started = time.monotonic()
    registry = build_registry(Config(discovered=select(None).plugins))
    device = pick_device(registry, "auto")
    cases: list[Case] = []
    for number, layout in enumerate(options.layouts, 1):
        end = started + options.seconds * number / len(options.layouts)
        cases += measured(registry, device, layout, options.batches, options.length, end)
    shown(cases)


if __name__ == "__main__":
    main()
