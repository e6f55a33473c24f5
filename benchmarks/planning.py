"""The scheduler's time for a step, on one core and without a model.

    OMP_NUM_THREADS=1 python benchmarks/planning.py

Steady decode: N requests run, and none waits. Loaded: N run and N wait. Requests end and others join all the time. The
cache is full, and the rest waits for places or for memory. Times are CPU time per step, so that a busy machine does
not count, in milliseconds: median and 99th percentile.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np
from llmcore.api.bridge import Prompt, Submit
from llmcore.api.protocols import SchedulerLimits
from llmcore.builtin.estimators import PastFuture
from llmcore.builtin.fcfs import FCFS
from llmcore.builtin.radix import RadixCache
from llmcore.kv.space import KVGroup
from llmcore.sched.plan import StepPlan, StepResult
from llmcore.sched.policy import GuardedEstimator, GuardedManager
from llmcore.sched.scheduler import Scheduler

VOCAB = 32_000


def make_scheduler(running: int, slots: int) -> Scheduler:
    """Returns a scheduler of one group with a radix cache."""
    limits = SchedulerLimits(
        max_running=running, max_input_len=8_000, max_total_len=16_384, batch_tokens=8_192, chunk_tokens=8_192
    )
    group = KVGroup(total=slots, rows=running, max_len=16_384, manager=RadixCache())
    group.manager = GuardedManager(group, "radix")
    estimator = GuardedEstimator(PastFuture(limits), "past_future")
    return Scheduler(limits, [group], FCFS(limits), estimator, ahead=1)


class Load:
    """Requests with a common system prompt of 200 tokens and answers of 50 to 500."""

    def __init__(self, scheduler: Scheduler, *, prompt: int, answer: tuple[int, int]) -> None:
        self._scheduler = scheduler
        self._random = np.random.default_rng(0)
        self._system = self._random.integers(0, VOCAB, 200)
        self._prompt = prompt
        self._answer = answer
        self._next = 0
        self._last: StepPlan | None = None

    def submit(self, n: int) -> None:
        """Submit `n` more requests."""
        for _ in range(n):
            prompt = np.concatenate([self._system, self._random.integers(0, VOCAB, self._prompt)])
            answer = int(self._random.integers(*self._answer))
            submit = Submit(id=self._next, prompt=Prompt.of(prompt), max_new_tokens=answer, stop_ids=(VOCAB,))
            self._next += 1
            self._scheduler.submit(submit, 0)

    def step(self) -> tuple[float, float, StepPlan | None]:
        """Returns the seconds to plan one step and to commit the one before it, and the plan."""
        start = time.thread_time()
        plan = self._scheduler.plan()
        planned = time.thread_time()
        last, self._last = self._last, plan
        committed = planned
        if last is not None:
            sampled = last.sample_row.size
            result = StepResult(self._random.integers(0, VOCAB, sampled).astype(np.int32), np.ones(sampled, np.bool_))
            planned_end = time.thread_time()
            self._scheduler.commit(last, result)
            committed = planned + time.thread_time() - planned_end
        return planned - start, committed - planned, plan


def measure(name: str, warm: Callable[[], None], load: Load, steps: int, refill: Callable[[], None]) -> float:
    """Prints a line of figures. Returns the median seconds to plan."""
    warm()
    plans, commits, rows = [], [], []
    for _ in range(steps):
        refill()
        planned, committed, plan = load.step()
        plans.append(planned)
        commits.append(committed)
        rows.append(plan.request.size if plan else 0)
    figures = [1e3 * float(np.percentile(values, q)) for values in (plans, commits) for q in (50, 99)]
    print(
        f"{name:34} plan {figures[0]:6.3f} (p99 {figures[1]:6.3f})   commit {figures[2]:6.3f} (p99 {figures[3]:6.3f})"
        f"   rows {np.mean(rows):5.0f}"
    )
    return float(np.median(plans))


def steady(n: int, steps: int) -> float:
    """`n` requests decode, and none waits."""
    scheduler = make_scheduler(n, 6_000 * n)
    load = Load(scheduler, prompt=300, answer=(4_000, 5_000))

    def warm() -> None:
        load.submit(n)
        while scheduler.load().waiting or (plan := load.step()[2]) is None or plan.n_decode < n:
            load.step()

    return measure(f"steady decode of {n}", warm, load, steps, lambda: None)


def loaded(n: int, steps: int, places: int, slots: int, what: str) -> float:
    """About `n` requests run and `n` wait."""
    scheduler = make_scheduler(places, slots)
    load = Load(scheduler, prompt=300, answer=(50, 500))

    def refill() -> None:
        load.submit(max(0, n - scheduler.load().waiting))

    def warm() -> None:
        for _ in range(600):
            refill()
            load.step()

    return measure(f"{n} run, {n} wait for {what}", warm, load, steps, refill)


def main() -> None:
    """Print the two figures and how they grow."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300)
    steps = parser.parse_args().steps
    print("milliseconds per step")
    steady(256, steps)
    small, large = steady(100, steps), steady(1_000, steps)
    print(f"{'growth from 100 to 1000':34} x {large / small:.1f}")
    small, large = (loaded(n, steps, n, 800 * n, "places") for n in (100, 1_000))
    print(f"{'growth from 100 to 1000':34} x {large / small:.1f}")
    small, large = (loaded(n, steps, 2 * n, 480 * n, "memory") for n in (100, 1_000))
    print(f"{'growth from 100 to 1000':34} x {large / small:.1f}")


if __name__ == "__main__":
    main()
