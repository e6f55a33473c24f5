"""What the parts of the scheduler share."""

from __future__ import annotations

from dataclasses import dataclass, field

from llmcore.kv.space import KVSpace
from llmcore.protocols import LengthEstimator, SchedulerLimits
from llmcore.sched.job import Job, WaitingQueue
from llmcore.sched.table import RequestTable


@dataclass
class Totals:
    """Counted since the start."""

    steps: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    preemptions: int = 0
    aborts: int = 0
    failed_steps: int = 0
    failed_requests: int = 0
    late_masks: int = 0
    """Tokens that were not drawn because a logits processor was not ready."""


@dataclass
class State:
    """Running requests, their KV, the queue, who is not done, and the number of the next step."""

    limits: SchedulerLimits
    table: RequestTable
    space: KVSpace
    estimator: LengthEstimator
    ahead: int
    queue: WaitingQueue = field(default_factory=WaitingQueue)
    requests: dict[tuple[int, int], dict[int, Job]] = field(default_factory=dict)
    """By (owner, id): the choices that have not ended; before they fork, only the first."""
    step: int = 0
    totals: Totals = field(default_factory=Totals)
