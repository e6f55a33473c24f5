"""An engine in this process, stepped by hand: no threads, no text, nothing between the clock and the steps."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Self

from llmcore.api.bridge import Prompt, SamplingParams, StepEvents, Submit
from llmcore.api.errors import ConfigError, LlmcoreError
from llmcore.config import Config
from llmcore.engine.build import build_engine
from llmcore.engine.model import Progress
from llmcore.registry.loader import build_registry
from llmcore_server import child

from llmcore_devtools.bench.figures import Spread, process_age
from llmcore_devtools.bench.ranks import led
from llmcore_devtools.bench.workloads import Lengths, Prompts, Workload

GREEDY = SamplingParams(temperature=0.0)
_OWNER = 0


@dataclass(frozen=True)
class Run:
    """One run of requests that were submitted together. `first`: seconds to each request's first token, sorted."""

    seconds: float
    requests: int
    prompt_tokens: int
    output_tokens: int
    steps: int
    preemptions: int
    first: tuple[float, ...]


class BenchEngine:
    """The engine of the settings, and runs on it; a context manager.

    The prefix cache is off unless `prefix_cache`. `ready`: seconds that building took. `since_start`: seconds from
    the start of the process until the engine was ready. Raises ConfigError as `llmcore serve` does.
    """

    def __init__(
        self,
        config: Config,
        *,
        prefix_cache: bool = False,
        sampling: SamplingParams = GREEDY,
        progress: Progress | None = None,
    ) -> None:
        if not prefix_cache:
            config = replace(config, scheduling=replace(config.scheduling, disable_dynamic_prompt_cache=True))
        self.config = config
        self.registry = build_registry(config)
        with ExitStack() as stack:
            stack.enter_context(self.registry.lifetime(config))
            began = time.perf_counter()
            self.engine = build_engine(config, self.registry, progress, stack.enter_context(led(config)))
            self._open = stack.pop_all()
        self.ready = time.perf_counter() - began
        self.since_start = process_age()
        self.facts = self.engine.facts
        self._prompts = Prompts(self.facts.vocab_size)
        self.sampling = sampling
        self._next = 0
        child.freeze()  # as the engine's own process does

    def run(self, lengths: Sequence[Lengths], choices: int = 1) -> Run:
        """Submit all requests at once, with fresh prompts and without stop ids, and step until all have ended. Each
        has `choices` answers.

        The clock starts before the first submit and ends with the last token on the host. Raises RequestError for a
        request that can never fit, and LlmcoreError if a request fails.
        """
        submits = [self.request(prompt, output, choices) for prompt, output in lengths]
        before = self.engine.load()
        tally = _Tally(len(submits))
        began = time.perf_counter()
        for submit in submits:
            self.engine.submit(submit, _OWNER)
        while not self.engine.idle:
            for events in self.engine.step():
                if _OWNER in events:
                    tally.take(events[_OWNER])
        seconds = time.perf_counter() - began
        asked = choices * sum(output for _, output in lengths)
        if tally.tokens != asked:
            raise LlmcoreError(f"{asked} tokens were asked for and {tally.tokens} came; this is a bug in llmcore")
        after = self.engine.load()
        return Run(
            seconds=seconds,
            requests=len(submits),
            prompt_tokens=sum(prompt for prompt, _ in lengths),
            output_tokens=tally.tokens,
            steps=after.steps - before.steps,
            preemptions=after.preemptions - before.preemptions,
            first=tuple(sorted(at - began for at in tally.first.values())),
        )

    def request(self, prompt: int, output: int, choices: int = 1) -> Submit:
        """A request with a fresh prompt of `prompt` tokens and `choices` answers of exactly `output`."""
        self._next += 1
        ids = Prompt.of(self._prompts.draw(prompt))
        return Submit(id=self._next, prompt=ids, max_new_tokens=output, n=choices, sampling=self.sampling)

    def fits(self, batch: int, length: int) -> str | None:
        """Why `batch` requests of `length` tokens cannot run at the same time, or None."""
        facts = self.facts
        if length > facts.max_total_len:
            return f"{length} tokens are more than --max_req_total_len {facts.max_total_len}"
        if batch > facts.max_running:
            return f"{batch} are more than --running_max_req_size {facts.max_running}"
        if batch * length > facts.kv_tokens:
            return f"{batch * length:,} tokens of KV are needed, there are {facts.kv_tokens:,}"
        return None

    def close(self) -> None:
        """Call the plugins' `on_shutdown`."""
        self._open.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@dataclass
class _Tally:
    """Totals of a run's events. It is cheap, because it runs between two steps."""

    waiting: int
    tokens: int = 0
    first: dict[int, float] = field(default_factory=dict)

    def take(self, events: StepEvents) -> None:
        if events.error:
            code, message = next(iter(events.error.values()))
            raise LlmcoreError(f"a request failed: {code}: {message}")
        self.tokens += len(events.tokens)
        if len(self.first) < self.waiting:
            now = time.perf_counter()
            for request, count in zip(events.request, events.count, strict=True):
                if count:
                    self.first.setdefault(request, now)


@dataclass(frozen=True)
class Latency:
    """One batch size: runs with the whole answer and runs with one token, by turns. Times are in seconds."""

    batch: int
    input_len: int
    output_len: int
    whole: tuple[Run, ...]
    one: tuple[Run, ...]

    @property
    def step(self) -> Spread:
        """Seconds of a decode step: (T(whole) - T(one token)) / (tokens - 1), per repeat."""
        pairs = zip(self.whole, self.one, strict=True)
        return Spread.of([(whole.seconds - one.seconds) / (self.output_len - 1) for whole, one in pairs])

    @property
    def first_token(self) -> Spread:
        """Seconds to the first token of the median request, in the runs with the whole answer."""
        return Spread.of([run.first[len(run.first) // 2] for run in self.whole])

    @property
    def times(self) -> tuple[Spread, Spread]:
        """Seconds of the runs with the whole answer, and of those with one token."""
        return Spread.of([run.seconds for run in self.whole]), Spread.of([run.seconds for run in self.one])


def measure_latency(
    engine: BenchEngine, batch: int, input_len: int, output_len: int, *, repeats: int = 3, warmup: int = 1
) -> Latency:
    """Time `batch` requests at once, `repeats` times after `warmup` times that do not count.

    Raises ConfigError if they cannot all run at once, or if the answer has fewer than 2 tokens.
    """
    if output_len < 2:
        raise ConfigError(f"--output_len {output_len}: a decode step needs answers of at least 2 tokens")
    if reason := engine.fits(batch, input_len + output_len):
        raise ConfigError(f"a batch of {batch} does not fit at once: {reason}")
    whole, one = [], []
    for repeat in range(warmup + repeats):
        pair = engine.run([(input_len, output_len)] * batch), engine.run([(input_len, 1)] * batch)
        if repeat >= warmup:
            whole.append(pair[0])
            one.append(pair[1])
    return Latency(batch, input_len, output_len, tuple(whole), tuple(one))


def measure_throughput(engine: BenchEngine, workload: Workload, *, repeats: int = 3, warmup: int = 1) -> list[Run]:
    """Time the whole workload, submitted at once, `repeats` times after `warmup` times that do not count."""
    runs = [engine.run(workload.lengths) for _ in range(warmup + repeats)]
    return runs[warmup:]
