"""The queue: whoever ran already goes first, then everyone in order of arrival."""

from __future__ import annotations

import numpy as np
import pytest
from llmcore.api import Submit
from llmcore.sched.job import Job, WaitingQueue


def job(arrival: int, n: int = 1) -> Job:
    prompt = np.array([1, 2], np.int32)
    submit = Submit(id=arrival, prompt=prompt.astype("<i4").tobytes(), max_new_tokens=3, n=n)
    return Job(submit, 0, 0, arrival, prompt, forks=n - 1)


def test_those_sent_back_go_first_oldest_first() -> None:
    queue = WaitingQueue()
    jobs = [job(i) for i in range(5)]
    for fresh in jobs[2:]:
        queue.append(fresh)
    queue.give_back(jobs[1])
    queue.give_back(jobs[0])
    assert [j.arrival for j in queue] == [0, 1, 2, 3, 4]
    queue.remove(jobs[1])
    queue.remove(jobs[3])
    assert ([j.arrival for j in queue], len(queue)) == ([0, 2, 4], 3)
    with pytest.raises(KeyError):
        queue.remove(jobs[3])


def test_a_job_knows_its_tokens() -> None:
    one = job(0, n=3)
    assert (one.choices, one.size, one.tokens().tolist()) == (3, 2, [1, 2])
    one.produced = np.array([9], np.int32)
    assert (one.size, one.content().tolist(), one.content().dtype) == (3, [1, 2, 9], np.int64)
    twin = one.fork(2, row=5)
    assert (twin.choice, twin.row, twin.arrival, twin.choices, twin.size) == (2, 5, 2, 1, 2)
