"""Checks that memory does not run out: the engine with its defaults, at its start and under the heaviest loads.

    python benchmarks/gpu_memory.py [--loads sizes mixed places pool] [--set mem_fraction=0.95]

Weights are random, from a config.json alone. The script prints the predicted and the measured memory. Then it prints
each load with its peaks beside the limit of `mem_fraction`. It fails if a request fails or ends early. The loads:

- sizes: batches of every captured size, in every variant of sampling
- mixed: small prompts that join a batch
- places: as many requests at once as may run, with every sampling option, until some are preempted
- pool: the longest requests until KV is full

`--shrink 100 --set device=cpu` divides sizes and lengths, to try the script itself on any machine.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from gpu import config_of
from llmcore.api.bridge import Finish, Prompt, SamplingParams, StepEvents, Submit
from llmcore.engine.memory import DEFAULT_TOTAL_LEN
from llmcore.engine.model import pick_device
from llmcore.sched.plan import MIXED_TOKENS, padded
from llmcore_devtools.bench.engine_runs import BenchEngine
from llmcore_devtools.bench.workloads import Prompts

OWNER = 0
GIB = 1 << 30
EVERYTHING = SamplingParams(
    temperature=0.8, top_k=50, top_p=0.9, typical_p=0.9, repetition_penalty=1.1, presence_penalty=0.5, logprobs=20
)
VARIANTS = {
    "greedy": SamplingParams(temperature=0.0),
    "temperature": SamplingParams(temperature=0.8),
    "filtered": SamplingParams(temperature=0.8, top_k=50, top_p=0.9, min_p=0.01),
    "full": EVERYTHING,
}
STEPS_PER_SIZE = 3
"""A step of a new size is captured when it comes again, and then replayed."""

Wave = list[Submit]
"""Requests that are submitted between two steps."""


class Requests:
    """Makes requests with prompts that are always new, and keeps what was requested."""

    def __init__(self, bench: BenchEngine, shrink: int) -> None:
        self.bench, self.facts, self.config, self._shrink = bench, bench.facts, bench.config, shrink
        self._prompts = Prompts(bench.facts.vocab_size)
        self._made = 0

    def steps(self, tokens: int) -> int:
        """The steps that compute `tokens` tokens of prompts. Longer answers keep all requests running at once."""
        most = self.config.scheduling.batch_max_tokens
        return tokens // (most or pick_device(self.bench.registry, self.config.model.device).step_tokens) + 1

    def n(self, count: int) -> int:
        """Returns a count or a length, reduced when the script itself is tried."""
        return max(1, count // self._shrink)

    @property
    def pool(self) -> int:
        """Returns the tokens of KV to be filled."""
        return self.facts.kv_tokens

    def make(self, prompt: int, output: int, sampling: SamplingParams, *, stops: bool = False) -> Submit:
        """`stops`: the model's eos ids are stop ids, but are not allowed before the answer has its full length."""
        self._made += 1
        return Submit(
            id=self._made,
            prompt=Prompt.of(self._prompts.draw(prompt)),
            max_new_tokens=output,
            min_new_tokens=output if stops else 0,
            stop_ids=tuple(self.facts.eos_ids) if stops else (),
            sampling=sampling,
        )


def sizes(requests: Requests) -> Iterator[Wave]:
    """Yields every captured size of a decode step in every variant: a batch whose requests end one after the other."""
    most = min(requests.config.kernels.graph_max_batch_size, requests.facts.max_running)
    steps = sorted({padded(size) for size in range(1, most + 1) if padded(size) <= most})
    prompt = requests.n(16)
    for sampling in VARIANTS.values():
        smaller = [0, *steps]
        yield [
            requests.make(prompt, 2 + STEPS_PER_SIZE * (len(steps) - place), sampling)
            for place, size in enumerate(steps)
            for _ in range(size - smaller[place])
        ]


def mixed(requests: Requests) -> Iterator[Wave]:
    """Yields prompts of every captured size, one between two steps. They join a small batch, in the widest variant."""
    lengths = [length for length in (1 << power for power in range(1, 7)) if length < MIXED_TOKENS]
    lengths += range(2 * lengths[-1], MIXED_TOKENS, lengths[-1])
    joining = [length for length in lengths for _ in range(STEPS_PER_SIZE)]
    yield [requests.make(requests.n(16), 2 * len(joining), EVERYTHING) for _ in range(4)]
    for length in joining:
        yield [requests.make(max(length - 8, 1), 2, EVERYTHING)]


def places(requests: Requests) -> Iterator[Wave]:
    """Yields as many requests as may run. Prompts of 1 to 2,000 tokens nearly fill KV, and answers exceed it.

    Earlier answers were short, so the scheduler admits more than will fit.
    """
    count, longest, output = requests.facts.max_running, requests.n(2000), requests.steps(requests.pool) + 32
    longest = min(longest, requests.facts.max_total_len - output)
    mean = min(0.94 * requests.pool / count, longest / 2)
    output = max(output, min(int(2.5 * (requests.pool / count - mean)), requests.facts.max_total_len - longest))
    power = longest / mean - 1
    yield [
        requests.make(1 + int((longest - 1) * (place / count) ** power), output, EVERYTHING, stops=True)
        for place in range(count)
    ]


def pool(requests: Requests) -> Iterator[Wave]:
    """Yields requests of max_req_total_len until KV is full to the last token."""
    facts = requests.facts
    output = requests.steps(requests.pool) + 16
    count, rest = divmod(requests.pool, facts.max_total_len)
    wave = [requests.make(facts.max_total_len - output, output, EVERYTHING) for _ in range(count)]
    if rest > output:
        wave.append(requests.make(rest - output, output, EVERYTHING))
    yield wave


LOADS: dict[str, Callable[[Requests], Iterator[Wave]]] = {
    "sizes": sizes,
    "mixed": mixed,
    "places": places,
    "pool": pool,
}


@dataclass
class Outcome:
    """The answers. `produced`: tokens by request. `wrong`: events that should not have come."""

    produced: dict[int, int] = field(default_factory=dict)
    ended: set[int] = field(default_factory=set)
    wrong: list[str] = field(default_factory=list)

    def take(self, events: StepEvents) -> None:
        self.wrong += [f"request {events.request[row]}: {code}: {text}" for row, (code, text) in events.error.items()]
        for request, count, finish in zip(events.request, events.count, events.finish, strict=True):
            self.produced[request] = self.produced.get(request, 0) + count
            if finish:
                self.ended.add(request)
                if finish != Finish.LENGTH:
                    self.wrong.append(f"request {request} ended with {Finish(finish).name}")

    def compare(self, asked: Iterable[Submit]) -> list[str]:
        """Returns the mistakes, request by request."""
        wrong = list(self.wrong)
        for request in asked:
            got = self.produced.get(request.id, 0)
            if got != request.max_new_tokens or request.id not in self.ended:
                wrong.append(f"request {request.id}: {got} of {request.max_new_tokens} tokens")
        return wrong


def memory_text(fraction: float) -> str:
    """Returns torch's and the driver's figures since the last call, beside `fraction` of all. Then it resets them."""
    if not torch.cuda.is_available():
        return "no GPU, so no figures of its memory"
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    allocated, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    others = total - free - torch.cuda.memory_reserved()
    retries = torch.cuda.memory_stats().get("num_alloc_retries", 0)
    torch.cuda.reset_peak_memory_stats()
    return (
        f"peaks: {allocated / GIB:.2f} GiB in tensors, {reserved / GIB:.2f} held by torch, "
        f"{(others + reserved) / GIB:.2f} with all else on the GPU; in use now {(total - free) / GIB:.2f} "
        f"({(total - free) / total:.1%}); allowed {fraction * total / GIB:.2f} of {total / GIB:.2f} ({fraction:.0%}); "
        f"{retries} allocations so far only after torch gave back what it did not use"
    )


def run(name: str, bench: BenchEngine, waves: Iterable[Sequence[Submit]], *, one_by_one: bool) -> list[str]:
    """Runs a load. Returns the mistakes in its outcome. `one_by_one`: a wave waits for the answers to the one
    before."""
    engine, outcome, asked = bench.engine, Outcome(), []
    before, most_live, most_running, began = engine.load(), 0, 0, time.perf_counter()
    for wave in [*waves, []]:
        for request in wave:
            engine.submit(request, OWNER)
        asked += wave
        stepped = False
        while not engine.idle and (one_by_one or not wave or not stepped):
            for events in engine.step():
                if OWNER in events:
                    outcome.take(events[OWNER])
            stepped = True
            now = engine.load()
            most_live, most_running = max(most_live, now.kv_live), max(most_running, now.running)
    after = engine.load()
    print(
        f"{name}: {len(asked):,} requests, at most {most_running:,} at once, {time.perf_counter() - began:.1f} s, "
        f"{after.steps - before.steps:,} steps, "
        f"{after.preemptions - before.preemptions:,} preemptions, KV at most {most_live / after.kv_total:.1%} full, "
        f"{engine.load().graphs} captured steps so far",
        flush=True,
    )
    if after.kv_live or after.running or after.waiting:
        outcome.wrong.append(f"not all was given back: {after}")
    return outcome.compare(asked)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-3.1-8b", help="a name in benchmarks/configs, or a directory")
    parser.add_argument("--loads", nargs="+", choices=LOADS, default=list(LOADS), help="default: all, in this order")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a setting of llmcore serve")
    parser.add_argument("--shrink", type=int, default=1)
    return parser.parse_args()


def main() -> int:
    options = parse()
    if not any(text.startswith("max_req_total_len=") for text in options.set):
        options.set.append(f"max_req_total_len={DEFAULT_TOTAL_LEN}")  # gpu.py has a smaller value
    config = config_of(options)
    fraction, wrong = config.memory.mem_fraction, list[str]()
    with BenchEngine(config) as bench:
        report = dict(bench.facts.report)
        for label in ("model", "device", "start", "predicted", "measured"):
            print(f"{label}: {report[label]}")
        print(f"at the start: {memory_text(fraction)}", flush=True)
        requests = Requests(bench, options.shrink)
        for name in options.loads:
            found = run(name, bench, LOADS[name](requests), one_by_one=name == "sizes")
            wrong += [f"{name}: {text}" for text in found]
            print(f"  {memory_text(fraction)}", flush=True)
    for text in wrong[:20]:
        print(text)
    print(f"{len(wrong)} FAILURES" if wrong else "every request was answered in full")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
