"""The rows of benchmarks/gpu.py: what is asked of the engine for each, and how its figure is made of times."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from llmcore.bench.engine_runs import BenchEngine, measure_latency
from llmcore.bench.stats import Spread
from llmcore.bench.workloads import Lengths, chat


@dataclass(frozen=True)
class Bench:
    """What rows are measured with. `n` makes a count or a length smaller where the script itself is tried."""

    engine: BenchEngine
    repeats: int
    shrink: int

    def n(self, count: int) -> int:
        return max(1, count // self.shrink)

    def requests(self, count: int, prompt: int, output: int) -> list[Lengths]:
        return [(self.n(prompt), self.n(output))] * self.n(count)

    def seconds(self, lengths: Sequence[Lengths], warmup: Sequence[Lengths], repeats: int | None = None) -> Spread:
        """Of `lengths` submitted at once, after `warmup` twice: a new size of step is captured when it comes again."""
        for _ in range(2):
            self.engine.run(warmup)
        return Spread.of([self.engine.run(lengths).seconds for _ in range(repeats or self.repeats)])


@dataclass(frozen=True)
class Row:
    """One line of the table; `measure` is None for what is measured in processes of its own."""

    key: str
    title: str
    unit: str
    measure: Callable[[Bench], Spread] | None

    @property
    def better(self) -> int:
        """1 where more is better, -1 where less is."""
        return 1 if self.unit == "tok/s" else -1


def decode(batch: int) -> Row:
    """(T(in 512, out 129) - T(in 512, out 1)) / 128."""

    def measure(bench: Bench) -> Spread:
        output = 1 + max(2, bench.n(128))
        found = measure_latency(bench.engine, bench.n(batch), bench.n(512), output, repeats=bench.repeats, warmup=2)
        return found.step.scaled(1e3)

    return Row(f"decode_{batch}", f"decode step, batch {batch}", "ms", measure)


def rate(lengths: Sequence[Lengths], seconds: Spread, outputs: bool) -> Spread:
    """Tokens per second, of prompts alone or of both."""
    tokens = sum(prompt + (output if outputs else 0) for prompt, output in lengths)
    return Spread(tokens / seconds.median, tokens / seconds.high, tokens / seconds.low)


def prefill(bench: Bench) -> Spread:
    lengths = bench.requests(32, 4096, 1)
    return rate(lengths, bench.seconds(lengths, bench.requests(8, 4096, 1)), outputs=False)


def first_token(bench: Bench) -> Spread:
    lengths = bench.requests(1, 512, 1)
    return bench.seconds(lengths, lengths * 2, 3 * bench.repeats).scaled(1e3)


def chat_mix(bench: Bench) -> Spread:
    return bench.seconds(chat(bench.n(1000)).lengths, chat(bench.n(400)).lengths)


def throughput(bench: Bench) -> Spread:
    lengths = bench.requests(512, 1024, 128)
    return rate(lengths, bench.seconds(lengths, bench.requests(128, 1024, 32)), outputs=True)


def long_prompts(bench: Bench) -> Spread:
    return bench.seconds(bench.requests(16, 6144, 256), bench.requests(16, 2048, 32))


ROWS = (
    *(decode(batch) for batch in (1, 8, 32, 64, 128, 256)),
    Row("prefill", "prefill, 32 x 4,096", "tok/s", prefill),
    Row("first_token", "first token of one 512-token prompt", "ms", first_token),
    Row("chat", "chat mix, 1,000 at once", "s", chat_mix),
    Row("throughput", "512 x (1,024 in, 128 out), in + out", "tok/s", throughput),
    Row("long", "16 x (6,144 in, 256 out)", "s", long_prompts),
)
STARTS = tuple(
    Row(f"start_{kind}", f"process start to ready, {what}", "s", None)
    for kind, what in (("cold", "nothing compiled"), ("warm", "kernels compiled"))
)
