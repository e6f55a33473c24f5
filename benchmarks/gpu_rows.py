"""The rows of benchmarks/gpu.py: the load of each, and how its figure follows from times."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from llmcore.engine.graphs import CAPTURED_AT
from llmcore_devtools.bench.engine_runs import BenchEngine, measure_latency
from llmcore_devtools.bench.figures import Spread
from llmcore_devtools.bench.workloads import Lengths, chat


@dataclass(frozen=True)
class Bench:
    """The engine and options for the rows. `n` reduces a count or a length when the script itself is tried."""

    engine: BenchEngine
    repeats: int
    shrink: int

    def n(self, count: int) -> int:
        return max(1, count // self.shrink)

    def requests(self, count: int, prompt: int, output: int) -> list[Lengths]:
        return [(self.n(prompt), self.n(output))] * self.n(count)

    def seconds(self, lengths: Sequence[Lengths], warmup: Sequence[Lengths], repeats: int | None = None) -> Spread:
        """The seconds of `lengths`, submitted at once. First it runs `warmup` until its step sizes are captured."""
        for _ in range(CAPTURED_AT):
            self.engine.run(warmup)
        return Spread.of([self.engine.run(lengths).seconds for _ in range(repeats or self.repeats)])


@dataclass(frozen=True)
class Row:
    """One line of the table. `measure` is None for rows that are measured in processes of their own.

    `loads`: the requests, for `--bound`. `figure` computes the line's figure from their seconds.
    """

    key: str
    title: str
    unit: str
    measure: Callable[[Bench], Spread] | None
    loads: Callable[[Bench], Sequence[Sequence[Lengths]]] = lambda _: ()
    figure: Callable[[Bench, Sequence[float]], float] = lambda _, seconds: seconds[0]

    @property
    def better(self) -> int:
        """1 if more is better, -1 if less is better."""
        return 1 if self.unit == "tok/s" else -1


def decode(batch: int) -> Row:
    """(T(in 512, out 129) - T(in 512, out 1)) / 128."""

    def steps(bench: Bench) -> int:
        return max(2, bench.n(128))

    def measure(bench: Bench) -> Spread:
        found = measure_latency(
            bench.engine, bench.n(batch), bench.n(512), 1 + steps(bench), repeats=bench.repeats, warmup=CAPTURED_AT
        )
        return found.step.scaled(1e3)

    def loads(bench: Bench) -> list[list[Lengths]]:
        return [[(bench.n(512), output)] * bench.n(batch) for output in (1 + steps(bench), 1)]

    def figure(bench: Bench, seconds: Sequence[float]) -> float:
        return (seconds[0] - seconds[1]) / steps(bench) * 1e3

    return Row(f"decode_{batch}", f"decode step, batch {batch}", "ms", measure, loads, figure)


def rate(key: str, title: str, count: int, lengths: Lengths, warmup: tuple[int, Lengths]) -> Row:
    """Tokens per second of `count` requests at once. Tokens of prompts count, and those of answers longer than one
    token."""

    def load(bench: Bench) -> list[Lengths]:
        return bench.requests(count, *lengths)

    def per_second(bench: Bench, seconds: float) -> float:
        prompt, output = load(bench)[0]
        return len(load(bench)) * (prompt + (output if lengths[1] > 1 else 0)) / seconds

    def measure(bench: Bench) -> Spread:
        found = bench.seconds(load(bench), bench.requests(warmup[0], *warmup[1]))
        return Spread(*(per_second(bench, seconds) for seconds in (found.median, found.high, found.low)))

    return Row(
        key, title, "tok/s", measure, lambda bench: [load(bench)], lambda bench, took: per_second(bench, took[0])
    )


def first_token(bench: Bench) -> Spread:
    lengths = bench.requests(1, 512, 1)
    return bench.seconds(lengths, lengths, 3 * bench.repeats).scaled(1e3)


def chats(bench: Bench) -> tuple[Lengths, ...]:
    return chat(bench.n(1000)).lengths


def long_prompts(bench: Bench) -> list[Lengths]:
    return bench.requests(16, 6144, 256)


ROWS = (
    *(decode(batch) for batch in (1, 8, 32, 64, 128, 256)),
    rate("prefill", "prefill, 32 x 4,096", 32, (4096, 1), (8, (4096, 1))),
    Row("first_token", "first token of one 512-token prompt", "ms", first_token),
    Row(
        key="chat",
        title="chat mix, 1,000 at once",
        unit="s",
        measure=lambda bench: bench.seconds(chats(bench), chats(bench)),
        loads=lambda bench: [chats(bench)],
    ),
    rate("throughput", "512 x (1,024 in, 128 out), in + out", 512, (1024, 128), (128, (1024, 32))),
    Row(
        key="long",
        title="16 x (6,144 in, 256 out)",
        unit="s",
        measure=lambda bench: bench.seconds(long_prompts(bench), bench.requests(16, 2048, 32)),
        loads=lambda bench: [long_prompts(bench)],
    ),
)
STARTS = tuple(
    Row(f"start_{kind}", f"process start to ready, {what}", "s", None)
    for kind, what in (("cold", "nothing compiled"), ("warm", "kernels compiled"))
)
