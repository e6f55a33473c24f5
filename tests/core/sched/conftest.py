"""A scheduler without an engine: tests name the tokens that steps return."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from llmcore.api.bridge import ChoiceEvent, Prompt, StepEvents, Submit, explode
from llmcore.api.protocols import SchedulerLimits
from llmcore.builtin.estimators import Conservative
from llmcore.builtin.fcfs import FCFS
from llmcore.builtin.radix import RadixCache
from llmcore.kv.space import KVGroup
from llmcore.sched.plan import StepPlan, StepResult
from llmcore.sched.processors import ChoiceProcessors
from llmcore.sched.scheduler import Scheduler


class Bench:
    """A scheduler, and steps whose samples are all `token` unless a test says otherwise."""

    def __init__(
        self,
        *,
        slots: int = 1000,
        granule: int = 1,
        policy: Callable[[SchedulerLimits], Any] = FCFS,
        estimator: Callable[[SchedulerLimits], Any] = Conservative,
        manager: Callable[[int], Any] = RadixCache,
        ahead: int = 0,
        priorities: bool = False,
        graph_rows: int = 0,
        drafts: int = 0,
        **limits: Any,
    ) -> None:
        given = {"max_running": 8, "max_input_len": 200, "max_total_len": 300, "batch_tokens": 64, "chunk_tokens": 64}
        self.limits = SchedulerLimits(**{**given, **limits})
        self.group = KVGroup(
            total=slots // granule,
            granule=granule,
            rows=self.limits.max_running,
            max_len=300,
            manager=manager(granule),
        )
        self.scheduler = Scheduler(
            self.limits,
            [self.group],
            policy(self.limits),
            estimator(self.limits),
            ahead=ahead,
            priorities=priorities,
            graph_rows=graph_rows,
            drafts=drafts,
        )
        self.events: dict[int, list[ChoiceEvent]] = {}

    def submit(
        self,
        id: int,
        prompt: Sequence[int],
        max_new: int = 4,
        owner: int = 0,
        processors: Sequence[ChoiceProcessors] = (),
        **more: Any,
    ) -> None:
        submit = Submit(id=id, prompt=Prompt.of(prompt), max_new_tokens=max_new, **more)
        self.scheduler.submit(submit, owner, processors)

    def plan(self) -> StepPlan:
        plan = self.scheduler.plan()
        assert plan is not None
        return plan

    def commit(self, plan: StepPlan, token: int = 7, finite: Sequence[bool] | None = None, **more: Any) -> None:
        size = plan.sample_row.size
        if "probed" in more:
            more = {"probed_ranks": np.ones(len(more["probed"]), np.int32), **more}
        good = np.ones(size, np.bool_) if finite is None else np.array(finite, np.bool_)
        self.receive(self.scheduler.commit(plan, StepResult(np.full(size, token, np.int32), good, **more)))
        self.scheduler.check()

    def receive(self, events: dict[int, StepEvents]) -> None:
        for columns in events.values():
            for request, event in explode(columns):
                self.events.setdefault(request, []).append(event)

    def step(self, token: int = 7, **more: Any) -> StepPlan:
        plan = self.plan()
        self.commit(plan, token, **more)
        return plan

    def drain(self) -> None:
        while not self.scheduler.idle:
            self.step()


@pytest.fixture
def bench() -> type[Bench]:
    return Bench
