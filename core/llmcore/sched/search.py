"""Beam searches among the running: who has spoken, and which sequence goes on in which place.

A beam runs like any other choice, but after each of its tokens it waits until all beams of its request have been
heard; then the places are dealt out anew. A sequence that goes on twice is copied by its table row; the device is
told of every beam's tokens with its next row, because what it drew itself does not count.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from llmcore.bridge import StepEvents
from llmcore.protocols import Int32
from llmcore.sched.beams import Beams, Child
from llmcore.sched.departures import Departures
from llmcore.sched.events import add_answers
from llmcore.sched.job import Job
from llmcore.sched.plan import StepResult
from llmcore.sched.state import State
from llmcore.sched.table import RequestTable


class Searches:
    """All of them; what each knows is in its `Beams`."""

    def __init__(self, state: State, departures: Departures) -> None:
        self._state = state
        self._departures = departures

    def hear(
        self, rows: Int32, at: NDArray[np.intp], result: StepResult, events: dict[int, StepEvents], stamp: float
    ) -> None:
        """`rows` of beams have their numbers `at` in a step's result; adds the answers of searches that end."""
        assert result.top_ids is not None and result.top_logprobs is not None
        table = self._state.table
        for row, s in zip(rows.tolist(), at.tolist(), strict=True):
            job, beams = table.job(row), table.beams[row]
            most = int(table.tops[row])
            if beams.hear(job.choice, result.top_ids[s, :most], result.top_logprobs[s, :most]):
                children = beams.choose()
                if children is None:
                    self._answer(job, beams, stamp, events)
                else:
                    self._deal(job, children)

    def _answer(self, job: Job, beams: Beams, stamp: float, events: dict[int, StepEvents]) -> None:
        answers = beams.answers()
        self._state.totals.output_tokens += sum(ended.path.length for ended in answers)
        self._state.estimator.observe(answers[0].path.length)
        add_answers(events, self._first(job), answers, stamp)
        self._departures.end(job)

    def _deal(self, job: Job, children: list[Child]) -> None:
        """Let every place go on as `children` say, by its number."""
        state, table = self._state, self._state.table
        leader = self._first(job)
        if leader.reserved:
            self._spread(leader)
        jobs = state.requests[leader.owner, leader.submit.id]
        rows = [jobs[choice].row for choice in range(len(children))]
        moved = [choice for choice, child in enumerate(children) if child.parent != choice]
        for choice in moved:
            state.space.drop(rows[choice])
        for choice in moved:
            source = rows[children[choice].parent]
            state.space.fork(source, rows[choice], int(table.computed[source]))
            table.copy(source, rows[choice])
        for choice, (row, child) in enumerate(zip(rows, children, strict=True)):
            known = int(table.known[row])
            table.tokens[row, known] = child.path.token
            table.known[row] = table.length[row] = known + 1
            table.renewed[row] = table.renewed.get(row, False) or choice in moved

    def _spread(self, leader: Job) -> None:
        """The first tokens of a prompt are there: its beams take the places that were reserved for them."""
        state = self._state
        places, leader.reserved = leader.reserved, []
        leader.forks = 0
        state.table.forks[leader.row] = 0
        for choice, place in enumerate(places, start=1):
            twin = leader.fork(choice, place)
            state.table.fork(leader.row, twin)
            state.requests[leader.owner, leader.submit.id][choice] = twin

    def _first(self, job: Job) -> Job:
        return self._state.requests[job.owner, job.submit.id][0]


def victim(running: Int32, table: RequestTable) -> int:
    """Of `running`, oldest first, the newest of the lowest priority that is neither the oldest nor a beam of its
    search."""
    others, oldest = running[1:], table.beams.get(int(running[0])) if table.beams else None
    if oldest is not None:
        others = others[[table.beams.get(row) is not oldest for row in others.tolist()]]
    return int(others[np.argsort(table.priority[others], kind="stable")][-1])


def outrun(rows: Int32, state: State) -> Int32:
    """`rows` without the beams that wait for others of their request."""
    table = state.table
    waiting = [row for row in table.beams if table.length[row] > table.known[row]]
    return rows[~np.isin(rows, waiting)] if waiting else rows
