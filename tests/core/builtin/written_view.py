"""A step as a policy sees it, on a view that a test writes down."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from llmcore.api.sched import Decision, RequestInfo, SchedulerLimits, WaitingRequest

LIMITS = SchedulerLimits(max_running=8, max_input_len=100, max_total_len=200, batch_tokens=16, chunk_tokens=8)
FIRST = 10
"""The index of the oldest running request; the others follow."""


class View:
    """Running requests by what remains of each, waiting ones by (tokens, cached, whether they fit).

    `ranks`, `queue_ranks`: their priorities. `read`: how many of the queue were looked at.
    """

    def __init__(
        self,
        remaining: Sequence[int],
        queue: Sequence[tuple[int, int, bool]] = (),
        *,
        admit: bool = True,
        whole: bool = False,
        prompt_budget: int = 16,
        ranks: Sequence[int] = (),
        queue_ranks: Sequence[int] = (),
    ) -> None:
        self.budget = 16
        self.prompt_budget = prompt_budget
        self.chunk = 16 if whole else 8
        self.whole = whole
        self.admit = admit
        self.running = np.arange(FIRST, FIRST + len(remaining), dtype=np.int32)
        self.remaining = np.array(remaining, np.int32)
        self.ranks = ranks or [0] * len(remaining)
        self.queue = queue
        self.queue_ranks = queue_ranks or [0] * len(queue)
        self.read = 0

    def info(self, index: int) -> RequestInfo:
        return RequestInfo(self.ranks[index - FIRST])

    def waiting(self, order: Callable[[RequestInfo], Any] | None = None) -> Iterator[WaitingRequest]:
        infos = [RequestInfo(rank) for rank in self.queue_ranks]
        for index in sorted(range(len(infos)), key=lambda i: order(infos[i]) if order else i):
            tokens, cached, _ = self.queue[index]
            self.read += 1
            yield WaitingRequest(
                index=index, tokens=tokens, cached=cached, max_new=5, choices=1, waited=0, info=infos[index]
            )

    def fits(self, candidate: WaitingRequest) -> bool:
        return self.queue[candidate.index][2]


def shares(decision: Decision) -> dict[int, int]:
    """Tokens by the index of a running request."""
    return dict(zip(decision.rows.tolist(), decision.n_query.tolist(), strict=True))
