"""Balancers compared in a simulated fleet, on one core and without a server.

    python benchmarks/fleet.py --replicas 300 --requests 100000

Lengths are those of real conversations (`lengths/sharegpt_qwen3.csv`). Every trace is played with every balancer that
is installed, or with those of `--balancers`. Columns: seconds to the first token (median and 99th percentile), the
share of prompt tokens that caches had, the most work that one replica got between two reports while another was idle
(above 3 it is a herd, as `llmcore_devtools.fleet.HERD` explains), the requests of the busiest replica beside the mean,
requests that were sent to a dead replica, and the seconds that the simulation took.

`--senders 8` has eight senders that share the calls, each with a balancer and a record of its own. They tell each
other of their calls, as the HTTP workers of one server do. With `--silent` they do not, as several routers do not.

`--kv_weights` plays the default with other weights of `kv_live` instead, and `--scarce` with other weights of an
uncached share. This is how `KV_WEIGHT` and `SCARCE` were chosen.
"""

from __future__ import annotations

import argparse
import csv
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from random import Random

from llmcore.api import BalancerSpec
from llmcore.api.balancing import Balancer
from llmcore.builtin.balancers import Cost
from llmcore.registry.loader import configure, load
from llmcore_devtools.fleet import TRACES, make_trace, simulate

LENGTHS = Path(__file__).resolve().parent / "lengths" / "sharegpt_qwen3.csv"

Makers = Mapping[str, Callable[[Random], Balancer]]


def read_lengths(path: Path) -> list[tuple[int, int]]:
    """Tokens of prompt and answer of every conversation in a file with a line of headings."""
    with path.open(newline="") as file:
        return [(int(prompt), int(answer)) for prompt, answer in list(csv.reader(file))[1:]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, default=300)
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--traces", nargs="+", choices=list(TRACES), default=list(TRACES))
    parser.add_argument("--balancers", nargs="+")
    parser.add_argument("--kv_weights", nargs="+", type=float)
    parser.add_argument("--scarce", nargs="+", type=float)
    parser.add_argument("--senders", type=int, default=1)
    parser.add_argument("--silent", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    makers: Makers
    weights = {"kv_weight": given.kv_weights or (), "scarce": given.scarce or ()}
    if any(weights.values()):
        makers = {
            f"cost, {name} {weight:g}": partial(Cost, **{name: weight})
            for name, several in weights.items()
            for weight in several
        }
    else:
        _, registry = configure()
        installed = {spec.name: load(spec.make) for spec, _ in registry.specs(BalancerSpec)}
        makers = {name: installed[name] for name in given.balancers or installed}
    lengths = read_lengths(LENGTHS)
    silent = ", silent" if given.silent else ""
    print(f"{given.replicas} replicas, {given.requests} requests, {given.senders} senders{silent}")
    print("| trace | balancer | p50 s | p99 s | hits | herd | busiest | to dead | took s |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for name in given.traces:
        trace = make_trace(name, lengths, given.replicas, given.requests, given.seed)
        for title, make in makers.items():
            begun = time.process_time()
            balancers = [
                make(Random(f"{given.seed} {number}" if number else given.seed)) for number in range(given.senders)
            ]
            out = simulate(trace, *balancers, telling=not given.silent)
            took = time.process_time() - begun
            print(
                f"| {name} | {title} | {out.quantile(0.5):.3f} | {out.quantile(0.99):.3f} | {out.hit:.1%} "
                f"| {out.herd:.2f} | {out.busiest:.2f} | {out.to_dead} | {took:.1f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
