"""Start-up times: of two commands that print, and of `llmcore serve` until it is ready.

    python benchmarks/start.py [--runs 10] [--model_dir PATH] [--data_type f32|bf16]
    python benchmarks/start.py --modes "triton_w4a16 g64" ... [--model_dir PATH] [--data_type f32|bf16]

The script prints the best and the median of the runs of `llmcore --help` and `llmcore plugins`. Then it starts a
server with the model several times, on this machine's CPU. A start ends when /readiness answers 200. `gpu.py` measures
the starts on a GPU, with and without compiled kernels.

With `--modes` it prints instead how much processor time each list of modes that quantize weights adds to loading the
model: the least of three times each, by turns.
"""

from __future__ import annotations

import argparse
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from llmcore_devtools.loaded_model import LoadedModel
from serve_cpu import DEMO, Server

STARTS = 3


def printing(name: str) -> float:
    """Returns the seconds of one run of a command."""
    began = time.perf_counter()
    subprocess.run([sys.executable, "-m", "llmcore.cli", name], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - began


def serving(model_dir: str, data_type: str) -> float:
    """Returns the seconds until a new server is ready."""
    began = time.perf_counter()
    server = Server(model_dir, data_type)
    seconds = time.perf_counter() - began
    server.close()
    return seconds


def loading(model_dir: str, data_type: str, modes: str) -> float:
    """Returns the seconds of processor time that loading takes under a list of modes."""
    began = time.process_time()
    LoadedModel(Path(model_dir), data_type=data_type, modes=modes.split(), requests=1)
    return time.process_time() - began


def quantizing(model_dir: str, data_type: str, lists: Sequence[str]) -> None:
    """Print what each list of modes adds."""
    best = dict.fromkeys(["", *lists], math.inf)
    for _ in range(STARTS):
        for modes, least in best.items():
            best[modes] = min(least, loading(model_dir, data_type, modes))
    for modes in lists:
        print(f"{modes:28} {best[modes] - best['']:+.2f} s beside {best['']:.2f} s", flush=True)


def report(name: str, times: Sequence[float]) -> None:
    """Print one line."""
    print(f"{name:28} best {min(times):.3f} s, median {statistics.median(times):.3f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--model_dir", default=str(DEMO))
    parser.add_argument("--data_type", default="f32")
    parser.add_argument("--modes", nargs="+", help="lists of modes")
    options = parser.parse_args()
    if options.modes is not None:
        quantizing(options.model_dir, options.data_type, options.modes)
        return
    for name in ("--help", "plugins"):
        report(f"llmcore {name}", [printing(name) for _ in range(options.runs)])
    starts = [serving(options.model_dir, options.data_type) for _ in range(STARTS)]
    report("llmcore serve, until ready", starts)


if __name__ == "__main__":
    main()
