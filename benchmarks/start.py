"""Start-up times: of two commands that print, and of `llmcore serve` until it is ready.

    python benchmarks/start.py [--runs 10] [--model_dir PATH] [--data_type f32|bf16]

The script prints the best and the median of the runs of `llmcore --help` and `llmcore plugins`. Then it starts a
server with the model several times, on this machine's CPU. A start ends when /readiness answers 200. `gpu.py` measures
the starts on a GPU, with and without compiled kernels.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence

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


def report(name: str, times: Sequence[float]) -> None:
    """Print one line."""
    print(f"{name:28} best {min(times):.3f} s, median {statistics.median(times):.3f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--model_dir", default=str(DEMO))
    parser.add_argument("--data_type", default="f32")
    options = parser.parse_args()
    for name in ("--help", "plugins"):
        report(f"llmcore {name}", [printing(name) for _ in range(options.runs)])
    starts = [serving(options.model_dir, options.data_type) for _ in range(STARTS)]
    report("llmcore serve, until ready", starts)


if __name__ == "__main__":
    main()
