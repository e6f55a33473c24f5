"""The clients' view of a server on one GPU, with and without a limit on prompts beside answers, in one run.

    python benchmarks/online_gpu.py [--stall_ms 0 20] [--rate 48] [--seconds 60] [--burst 1000] [--set NAME=VALUE]

Weights are random, from a config.json alone. The tokenizer is synthetic, with the model's vocabulary size. The script
starts a server for each value of `--prefill_stall_ms` (0: no limit). Requests of real conversations' lengths arrive at
`--rate` for `--warm` seconds, and then all at once, so that frequent steps are captured. Then both are repeated and
measured. All settings get the same arrivals and lengths. The script prints one line for each, in milliseconds over
requests: the first token, the time per further token, and the longest gap inside an answer. The line also has the
number of steps that were captured meanwhile, and the seconds of the burst. `gaps.py` predicts the figures without a
GPU. `--shrink 20 --set device=cpu` tries the script on any machine.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
import time
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gaps import LENGTHS
from guided_gpu import with_tokenizer
from llmcore_devtools.bench.client import DIALECTS, Target
from llmcore_devtools.bench.load import figures, offer, payloads
from llmcore_devtools.bench.workloads import Lengths, read_lengths
from llmcore_devtools.server import serving
from llmcore_server.supervisor import Pace

LAYOUT = "{:>9}  {:>17}  {:>15}  {:>17}  {:>8}  {:>8}  {:>10}  {:>8}"
START_SECONDS, RUN_SECONDS = 300.0, 150.0


def measure(target: Target, lengths: Sequence[Lengths], rate: float, vocab: int, seed: int) -> Mapping[str, Any]:
    """Measures one rate. Raises RuntimeError if a request fails."""
    requests = payloads(target, lengths, vocab, "")
    found = figures(offer(target, requests, lengths, rate, seconds=RUN_SECONDS, seed=seed), {})
    if found["answered"] < found["requests"]:
        raise RuntimeError(f"{found['failed']} failed, {found['unfinished']} were not done: {found['errors']}")
    return found


def shown(found: Mapping[str, Any], name: str) -> str:
    """Returns p50 / p99."""
    return f"{found[name]['p50']:.1f} / {found[name]['p99']:.1f}"


def one(model: Path, stall: float, options: argparse.Namespace) -> dict[str, Any]:
    """Starts a server with a setting, warms it up, and measures."""
    settings: dict[str, Any] = dict(text.split("=", 1) for text in options.set)
    settings |= {"load_format": "dummy", "max_req_total_len": 8192, "prefill_stall_ms": stall}
    warm, steady = int(options.rate * options.warm), int(options.rate * options.seconds)
    vocab = json.loads((model / "config.json").read_text())["vocab_size"]
    lengths = read_lengths(LENGTHS, steady, options.seed).lengths
    burst = read_lengths(LENGTHS, options.burst, options.seed).lengths
    if options.shrink > 1:
        cut = [(-(-p // options.shrink), -(-o // options.shrink)) for p, o in (*lengths, *burst)]
        lengths, burst = tuple(cut[: len(lengths)]), tuple(cut[len(lengths) :])
    began = time.perf_counter()
    with serving(model, pace=Pace(), timeout=START_SECONDS, **settings) as server:
        ready = time.perf_counter() - began
        with urllib.request.urlopen(f"{server.admin}/server_info") as answer:
            prompts = json.load(answer)["summary"].get("prompts", "no limit")
        print(f"# {stall:g} ms: {prompts}; ready after {ready:.0f} s", flush=True)
        target = Target(server.url, DIALECTS["lightllm"] if options.native else DIALECTS["openai-completions"])
        measure(target, lengths[:warm], options.rate, vocab, options.seed + 1)
        measure(target, burst, math.inf, vocab, options.seed)
        before = captured(server.admin)
        online = measure(target, lengths, options.rate, vocab, options.seed)
        during = captured(server.admin) - before
        at_once = measure(target, burst, math.inf, vocab, options.seed)
    return {"stall_ms": stall, "online": online, "burst": at_once, "captured": during}


def captured(admin: str) -> int:
    """Returns the number of steps that the server has captured so far."""
    with urllib.request.urlopen(f"{admin}/metrics") as answer:
        lines = answer.read().decode().splitlines()
    return sum(int(float(line.split()[-1])) for line in lines if line.startswith("llmcore_graphs_captured"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3-8b", help="a name in benchmarks/configs")
    parser.add_argument("--stall_ms", type=float, nargs="+", default=[0.0, 20.0])
    parser.add_argument("--rate", type=float, default=48.0)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--warm", type=float, default=15.0)
    parser.add_argument("--burst", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--native", action="store_true", help="/generate_stream instead of /v1/completions")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a setting of llmcore serve")
    parser.add_argument("--shrink", type=int, default=1, help="divides lengths")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    results = []
    with tempfile.TemporaryDirectory() as folder:
        model = with_tokenizer(options.model, Path(folder))
        print(
            LAYOUT.format(
                *("stall, ms", "first p50 / p99", "per token", "longest gap", "captured"),
                *("burst, s", "its tok/s", "client"),
            )
        )
        for stall in options.stall_ms:
            found = one(model, stall, options)
            results.append(found)
            online, burst = found["online"], found["burst"]
            columns = [shown(online, name) for name in ("ttft_ms", "tpot_ms", "gap_ms")]
            total, speed = f"{burst['seconds']:.2f}", f"{burst['output_tokens_per_s']:,.0f}"
            columns += [found["captured"], total, speed, f"{online['client_busy']:.0%}"]
            print(LAYOUT.format(f"{stall:g}", *columns), flush=True)
    if options.json:
        options.json.write_text(json.dumps(results, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
