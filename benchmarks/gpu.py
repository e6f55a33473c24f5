"""The engine's figures on one GPU, beside the GPU's own ceilings and other engines' figures.

    python benchmarks/gpu.py [--rows decode_1 chat ...] [--profile] [--json FILE] [--set disable_cudagraph=true]

Weights are random, from a config.json alone; nothing is downloaded. The prefix cache is off, and prompts are new in
every run. The script prints the start-up summary, every row when it is measured, and the whole table last.
`start_cold` and `start_warm` start the engine in two further processes first, the first of them without compiled
kernels. Both count from the start of the process. Beside decode steps the table shows the bytes and flops that their
ops declare. The experts that a mixture really reads are counted in an engine of its own. `--bound` runs every row once
more, step by step, and compares each step with a lower bound (dense models only). The bound has the linears, attention
and copies alone, at the rates that this GPU sustains for seconds. `--shrink 100` divides batches and lengths, to try
the script itself on any machine.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import gpu_floor
from gpu_rows import ROWS, STARTS, Bench, Row
from llmcore.api.specs import DeviceInfo, OptionSpec
from llmcore.config import Config, resolve_config, with_plugins
from llmcore.engine.model import pick_device
from llmcore.registry.loader import build_registry, discover
from llmcore_devtools.bench.engine_runs import BenchEngine
from llmcore_devtools.bench.machine import machine, versions
from llmcore_devtools.bench.stats import Spread

HERE = Path(__file__).resolve().parent
CONFIGS = HERE / "configs"
PEERS = json.loads((HERE / "peers.json").read_text())
SETTINGS = {"load_format": "dummy", "max_req_total_len": "8192"}


def config_of(options: argparse.Namespace) -> Config:
    """Returns the settings of this run, as `llmcore serve` would take them."""
    model = options.model if os.path.sep in options.model else str(CONFIGS / options.model)
    given: dict[str, Any] = {**SETTINGS, "model_dir": model}
    for text in options.set:
        name, _, value = text.partition("=")
        given[name] = [*given[name], value] if isinstance(given.get(name), list) else [value]
    given = {name: value[0] if isinstance(value, list) and len(value) == 1 else value for name, value in given.items()}
    plugins = given.get("plugins")
    listed = tuple(plugins) if isinstance(plugins, list) else (plugins,) if plugins else None
    registry = build_registry(Config(discovered=discover(listed)))
    config, _ = resolve_config(given, {}, {}, extra=[spec for spec, _ in registry.specs(OptionSpec)])
    return with_plugins(config, registry.offered)


def start_apart(environment: Mapping[str, str]) -> tuple[float, float]:
    """The seconds until an engine in a new process was ready: since the process began, and those of building it."""
    command = [sys.executable, __file__, *sys.argv[1:], "--start-only"]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    began, building = done.stdout.splitlines()[-1].split()
    return float(began), float(building)


def measure(rows: Sequence[Row], bench: Bench) -> dict[str, Spread]:
    """Measures every row and prints it at once. A row that fails ends the measuring, not the script."""
    found: dict[str, Spread] = {}
    for row in rows:
        if row.measure is None:
            continue
        began = time.perf_counter()
        try:
            found[row.key] = row.measure(bench)
        except Exception:  # noqa: BLE001 - the rows before it are worth printing
            print(f"{row.title}: FAILED\n{traceback.format_exc()}", flush=True)
            break
        print(f"{row.title}: {found[row.key]} {row.unit}, in {time.perf_counter() - began:.0f} s", flush=True)
    return found


def near_the_floor(
    config: Config, device: DeviceInfo, limits: Mapping[str, float], found: Mapping[str, Spread]
) -> list[dict[str, Any]]:
    """Returns what decode steps must move and compute, beside their time. On failure it prints the reason and returns
    []."""
    steps = {
        int(key.removeprefix("decode_")): step.median / 1e3 for key, step in found.items() if key.startswith("decode_")
    }
    try:
        return gpu_floor.lines(config, device, limits, steps) if steps else []
    except Exception:  # noqa: BLE001 - the table is worth printing
        print(f"floor of decode steps: FAILED\n{traceback.format_exc()}", flush=True)
        return []


def profile(engine: BenchEngine) -> dict[str, Any] | None:
    """Returns the profile's figures. Without any it prints the reason and returns None."""
    from gpu_profile import report

    try:
        return report(engine)
    except Exception:  # noqa: BLE001 - the table is worth printing
        print(f"profile: FAILED\n{traceback.format_exc()}", flush=True)
        return None


def table(rows: Sequence[Row], found: dict[str, Spread], peers: dict[str, Any]) -> list[str]:
    """Returns lines: our figure, what must and should be reached, the best other figure, and whether we reach it."""
    layout = "{:<38} {:>28} {:>8} {:>8} {:>8}  {:<17} {:>8}  {}"
    lines = [layout.format("row", "median (lowest-highest)", "must", "aim", "peer", "", "to peer", "")]
    for row in rows:
        line, got = peers.get(row.key, {}), found.get(row.key)
        must, aim, peer = (line.get(name) for name in ("must", "aim", "peer"))
        verdict, gain = "not measured", ""
        if got is not None:
            reached = [
                name for name, mark in (("aim", aim), ("must", must)) if mark and row.better * (got.median - mark) >= 0
            ]
            verdict = reached[0] if reached else "MISSED" if must else ""
            gain = f"{row.better * (got.median / peer - 1):+.1%}" if peer else ""
        shown = (f"{mark:,}" if mark else "" for mark in (must, aim, peer))
        lines.append(layout.format(row.title, f"{got or '-'} {row.unit}", *shown, line.get("who", ""), gain, verdict))
    return lines


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    keys = [row.key for row in (*STARTS, *ROWS)]
    parser.add_argument("--model", default="llama-3.1-8b", help="a name in benchmarks/configs, or a directory")
    parser.add_argument("--rows", nargs="+", choices=keys, default=keys, help="default: all")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a setting of llmcore serve")
    parser.add_argument("--profile", action="store_true", help="also profile decode steps and an eager step")
    parser.add_argument("--bound", action="store_true", help="also print what bounds every row of a dense model")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--shrink", type=int, default=1)
    parser.add_argument("--start-only", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    options = parse()
    config = config_of(options)
    if options.start_only:
        with BenchEngine(config) as engine:
            print(engine.since_start, engine.ready)
        return 0
    rows = [row for row in (*ROWS, *STARTS) if row.key in options.rows]
    found: dict[str, Spread] = {}
    with tempfile.TemporaryDirectory() as fresh:
        if "start_cold" in options.rows:
            os.environ["TRITON_CACHE_DIR"] = fresh
        for row in STARTS:
            if row in rows:
                began, building = start_apart(os.environ)
                found[row.key] = Spread.of([began])
                print(f"{row.title}: {began:.1f} s, of which {building:.1f} s to build the engine", flush=True)
        return run(options, config, rows, found)


def run(options: argparse.Namespace, config: Config, rows: Sequence[Row], found: dict[str, Spread]) -> int:
    """Runs everything in this process. Returns 0 if every row was measured."""
    import gpu_bound
    import torch

    limits: dict[str, float] = {}
    profiled = None
    shape = gpu_bound.Shape.of(config.model.path) if options.bound else None
    if torch.cuda.is_available():
        from gpu_ceilings import ceilings

        limits = ceilings()
    best = gpu_bound.sustained(shape) if shape else None
    with BenchEngine(config) as engine:
        report = dict(engine.facts.report)
        for label, text in report.items():
            print(f"{label}: {text}")
        print(f"ready: {engine.ready:.1f} s to build\n", flush=True)
        bench = Bench(engine, options.repeats, options.shrink)
        found |= measure(rows, bench)
        if options.profile and all(row.key in found for row in rows):
            profiled = profile(engine)
        bounds = gpu_bound.beside(bench, [row for row in rows if row.key in found], best) if best else []
        known, ready = versions(engine.registry), engine.ready
        info = pick_device(engine.registry, config.model.device).info
    del engine, bench
    shares = near_the_floor(config, info, limits, found) if limits else []
    chip = next((name for name in ("H200", "H100") if name in report["device"]), "H200")
    peers = PEERS.get(Path(options.model).name, {}).get(chip, {})
    print(f"\n{Path(options.model).name} on {report['device']}, {machine()['cpu']}; peers on {chip}")
    print(", ".join(f"{name} {version}" for name, version in known.items()))
    for name, value in limits.items():
        print(f"ceiling {name}: {value:,.2f} (the peers' run: {PEERS['ceilings'][chip][name]})")
    beside = [*(best.lines() if best else ()), *bounds, *map(gpu_floor.text, shares)]
    print("\n".join([*table(rows, found, peers), *beside]), flush=True)
    if options.json:
        content = {
            "model": options.model,
            "settings": options.set,
            "machine": machine(),
            "versions": known,
            "engine": report,
            "ready_s": ready,
            "ceilings": limits,
            "rows": {key: asdict(spread) for key, spread in found.items()},
            "sustained": None if best is None else asdict(best),
            "decode_floor": shares,
            "profile": profiled,
        }
        options.json.write_text(json.dumps(content, indent=2) + "\n")
    return 0 if len(found) == len(rows) else 1


if __name__ == "__main__":
    sys.exit(main())
