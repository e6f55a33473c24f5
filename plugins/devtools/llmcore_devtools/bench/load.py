"""Open-loop load: requests leave at their own times, without waiting for earlier answers. No torch."""

from __future__ import annotations

import asyncio
import gc
import math
import random
import resource
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from llmcore.api.errors import ConfigError

from llmcore_devtools.bench.client import Answer, Target, ask
from llmcore_devtools.bench.figures import distribution, meets
from llmcore_devtools.bench.workloads import Lengths, Prompts

OBJECTIVES = ("ttft", "tpot", "gap", "e2e")
"""Milliseconds of one answer: to the first token; per further token; the longest time between two arrivals of tokens;
to the last byte."""
METRICS = (*OBJECTIVES, "itl")
"""`itl`: milliseconds between two arrivals of tokens, over all answers."""

_WORDS = ("the", "river", "of", "stone", "and", "light", "under", "a", "quiet", "morning", "with", "seven", "birds")
_FILES_BESIDE = 64


@dataclass(frozen=True)
class Window:
    """All answers of one rate, and the client's own load.

    `seconds`: from the first departure to the last end. `busy`: share of a core that the client used. `late`: the
    longest delay of a request's departure, in seconds. If these two are high, the client was the bottleneck.
    """

    rate: float
    seconds: float
    answers: tuple[Answer, ...]
    busy: float
    late: float


def departures(n: int, rate: float, seed: int) -> list[float]:
    """Seconds at which `n` requests leave: a Poisson process of `rate` per second, or all at once if it is inf."""
    if math.isinf(rate):
        return [0.0] * n
    draw = random.Random(seed)
    times, now = [], 0.0
    for _ in range(n):
        times.append(now)
        now += draw.expovariate(rate)
    return times


def payloads(target: Target, lengths: Sequence[Lengths], vocab_size: int, model: str) -> list[bytes]:
    """The bytes of every request, made before the clock starts."""
    prompts, draw = Prompts(vocab_size), random.Random()
    found = []
    for prompt, output in lengths:
        ids = prompts.draw(prompt).tolist()
        text = " ".join(draw.choices(_WORDS, k=prompt))
        found.append(target.request(ids, text, output, model))
    return found


def offer(
    target: Target, requests: Sequence[bytes], lengths: Sequence[Lengths], rate: float, *, seconds: float, seed: int
) -> Window:
    """Send all requests at `rate` per second and wait for the answers. After `seconds`, open requests are given up."""
    _allow_connections(len(requests))
    answers = [Answer(prompt, output) for prompt, output in lengths]
    gc.collect()
    gc.disable()  # a pause of the client would count as a gap in every answer
    began, used = time.perf_counter(), time.process_time()
    try:
        late = asyncio.run(_offer(target, requests, answers, departures(len(requests), rate, seed), seconds))
    finally:
        gc.enable()
    spent = time.perf_counter() - began
    ends = [answer.ended for answer in answers if answer.ended]
    busy = (time.process_time() - used) / spent
    length = max(ends) - began if len(ends) == len(answers) else spent
    return Window(rate, length, tuple(answers), busy, late)


async def _offer(
    target: Target, requests: Sequence[bytes], answers: Sequence[Answer], times: Sequence[float], seconds: float
) -> float:
    began, late = time.perf_counter(), 0.0
    running: list[asyncio.Task[None]] = []
    for request, answer, due in zip(requests, answers, times, strict=True):
        if due >= seconds:
            break
        if (left := began + due - time.perf_counter()) > 0:
            await asyncio.sleep(left)
        late = max(late, time.perf_counter() - began - due)
        running.append(asyncio.create_task(ask(target, request, answer)))
    if running:
        await asyncio.wait(running, timeout=max(0.0, began + seconds - time.perf_counter()))
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    return late


def latencies(answer: Answer) -> dict[str, float | None]:
    """The OBJECTIVES' values of one answer, in ms; None for `tpot` of one token, and for `gap` of one arrival."""
    first = answer.arrivals[0][0]
    last, tokens = answer.arrivals[-1]
    return {
        "ttft": (first - answer.sent) * 1e3,
        "tpot": (last - first) / (tokens - 1) * 1e3 if tokens > 1 else None,
        "gap": max(gaps(answer), default=None),
        "e2e": (answer.ended - answer.sent) * 1e3,
    }


def gaps(answer: Answer) -> list[float]:
    """Milliseconds between arrivals of tokens. A piece with several tokens is one arrival."""
    times = [at for at, _ in answer.arrivals]
    return [(after - before) * 1e3 for before, after in pairwise(times)]


def figures(window: Window, objectives: Mapping[str, float]) -> dict[str, Any]:
    """Rates and distributions over the answered requests, and the number of the others.

    `objectives`: metric -> most milliseconds. Goodput counts the answers that meet all of them.
    """
    good = [answer for answer in window.answers if answer.ended and answer.error is None]
    given_up = sum(1 for answer in window.answers if not answer.ended)
    each = [latencies(answer) for answer in good]
    found: dict[str, Any] = {
        "request_rate": "inf" if math.isinf(window.rate) else window.rate,
        "seconds": window.seconds,
        "requests": len(window.answers),
        "answered": len(good),
        "unfinished": given_up,
        "failed": len(window.answers) - len(good) - given_up,
        "errors": dict(Counter(answer.error for answer in window.answers if answer.error).most_common(5)),
        "requests_per_s": len(good) / window.seconds,
        "prompt_tokens_per_s": sum(answer.prompt for answer in good) / window.seconds,
        "output_tokens_per_s": sum(answer.tokens for answer in good) / window.seconds,
        "client_busy": window.busy,
        "client_late_s": window.late,
    }
    for name in OBJECTIVES:
        found[f"{name}_ms"] = distribution([value for one in each if (value := one[name]) is not None])
    found["itl_ms"] = distribution([gap for answer in good for gap in gaps(answer)])
    if objectives:
        kept = sum(1 for one in each if meets(one, objectives))
        found["goodput"] = {
            "objectives_ms": dict(objectives),
            "requests_per_s": kept / window.seconds,
            "share": kept / len(window.answers),
        }
    return found


def raw(window: Window) -> list[dict[str, Any]]:
    """Every answer, with times in seconds since its request left."""
    rows = []
    for answer in window.answers:
        row = asdict(answer)
        row["arrivals"] = [(round(at - answer.sent, 6), tokens) for at, tokens in answer.arrivals]
        row["ended"] = round(answer.ended - answer.sent, 6) if answer.ended else None
        del row["sent"]
        rows.append(row)
    return rows


def parse_objectives(texts: Sequence[str]) -> dict[str, float]:
    """Metric -> most milliseconds, from texts like `ttft=500` or `tpot=50ms`. Raises ConfigError."""
    found: dict[str, float] = {}
    for text in texts:
        name, _, value = text.partition("=")
        try:
            found[name] = float(value.strip().removesuffix("ms"))
        except ValueError as error:
            raise ConfigError(f"--slo {text!r}: write ttft=500, in ms.") from error
        if name not in OBJECTIVES or not found[name] > 0:
            raise ConfigError(f"--slo {text!r}: an objective is a time above 0 ms for ttft, tpot, gap or e2e.")
    return found


def _allow_connections(n: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = n + _FILES_BESIDE
    if soft == resource.RLIM_INFINITY or needed <= soft:
        return
    if hard != resource.RLIM_INFINITY and needed > hard:
        raise ConfigError(f"{n} requests may need {needed} open files and {hard} are allowed; see `ulimit -Hn`.")
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
