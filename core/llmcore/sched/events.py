"""What a step did, as columns for each owner."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import compress

import numpy as np
from numpy.typing import NDArray

from llmcore.bridge import Finish, StepEvents
from llmcore.protocols import Int32
from llmcore.sched.beams import Ended
from llmcore.sched.job import Job
from llmcore.sched.plan import StepResult
from llmcore.sched.table import RequestTable

Reason = tuple[str, str]
"""Why a request ends with an error: (code, message)."""


@dataclass(frozen=True)
class Accepted:
    """Tokens that were read, one for each of `rows`: columns. Token i is number `at[i]` of the step's result.

    `finish` is a Finish. The table counts the tokens already, and the rows still have their places.
    """

    rows: Int32
    tokens: Int32
    finish: Int32
    at: NDArray[np.intp]


def by_owner(accepted: Accepted, table: RequestTable, result: StepResult, stamp: float) -> dict[int, StepEvents]:
    """The events of one step for each owner."""
    owners = table.owner[accepted.rows]
    if not owners.size:
        return {}
    if (owners == owners[0]).all():
        return {int(owners[0]): _events(accepted, table, result, stamp)}
    events = {}
    for owner in np.unique(owners):
        mine = np.flatnonzero(owners == owner)
        part = Accepted(accepted.rows[mine], accepted.tokens[mine], accepted.finish[mine], accepted.at[mine])
        events[int(owner)] = _events(part, table, result, stamp)
    return events


def add_errors(events: dict[int, StepEvents], jobs: Iterable[Job], error: Reason, stamp: float) -> None:
    """Every choice of `jobs` ends with `error`."""
    for job in jobs:
        mine = _of(job, events, stamp)
        for choice in range(job.choice, job.choice + job.choices) if job.beams is None else range(job.submit.n):
            mine.error[len(mine.request)] = error
            mine.request.append(job.submit.id)
            mine.choice.append(choice)
            mine.count.append(0)
            mine.finish.append(Finish.ERROR)


def add_answers(events: dict[int, StepEvents], job: Job, answers: Sequence[Ended], stamp: float) -> None:
    """The choices of `job`, whose search is over, end with `answers`."""
    mine = _of(job, events, stamp)
    asked = job.beams.submit.sampling.logprobs if job.beams is not None else None
    for choice, ended in enumerate(answers):
        path, i = ended.path.tokens(), len(mine.request)
        if asked is not None and not mine.logprobs:
            mine.logprobs = [0.0] * len(mine.tokens)
        if asked is not None or mine.logprobs:
            mine.logprobs += [one.logprob if asked is not None else 0.0 for one in path]
        if asked:
            mine.top[i] = [list(one.top) for one in path]
        if choice == 0 and job.prompt_logprobs is not None:
            _add_prompt(mine, i, job)
        mine.cached[i] = job.cached
        mine.request.append(job.submit.id)
        mine.choice.append(choice)
        mine.count.append(len(path))
        mine.tokens += [one.token for one in path]
        mine.finish.append(ended.finish)


def _of(job: Job, events: dict[int, StepEvents], stamp: float) -> StepEvents:
    """The events of the job's owner, to add to."""
    empty = StepEvents(stamp=stamp, request=[], choice=[], count=[], tokens=[], finish=[])
    return events.setdefault(job.owner, empty)


def _events(accepted: Accepted, table: RequestTable, result: StepResult, stamp: float) -> StepEvents:
    rows = accepted.rows
    events = StepEvents(
        stamp=stamp,
        request=table.request[rows].tolist(),
        choice=table.choice[rows].tolist(),
        count=[1] * rows.size,
        tokens=accepted.tokens.tolist(),
        finish=accepted.finish.tolist(),
    )
    for i in np.flatnonzero(table.known[rows] == table.prompt_len[rows] + 1):
        job = table.job(int(rows[i]))
        events.cached[int(i)] = job.cached
        if int(rows[i]) in table.probing:
            _add_prompt(events, int(i), job)
            table.probing.discard(int(rows[i]))
    if result.scores is not None:
        events.count, events.tokens = [0] * rows.size, []
        events.scores = dict(enumerate(result.scores[accepted.at].tolist()))
    if result.logprobs is not None:
        _add_logprobs(events, accepted.at, table.tops[rows], result.logprobs, result)
    return _without_tokens(events) if events.pooled else events


def _add_prompt(events: StepEvents, i: int, job: Job) -> None:
    """Row `i` brings what its job wants of its prompt."""
    if job.prompt_logprobs is not None:
        events.prompt_logprobs[i] = job.prompt_logprobs.tolist()
    if job.prompt_ranks is not None:
        events.prompt_ranks[i] = job.prompt_ranks.tolist()
    if job.prompt_top is not None:
        places = zip(*(column.tolist() for column in job.prompt_top), strict=True)
        events.prompt_top[i] = [list(zip(ids, logprobs, strict=True)) for ids, logprobs in places]
    if job.pooled is not None:
        count = job.prompt.size if job.submit.pool == "mean" else 1
        events.pooled[i] = (job.pooled / count).astype("<f4").tobytes()
    job.prompt_logprobs = job.prompt_ranks = job.prompt_top = None


def _without_tokens(events: StepEvents) -> StepEvents:
    """The rows that bring a hidden state have been drawn for, too, but nobody asked for that."""
    kept = [i not in events.pooled for i in range(len(events.count))]
    events.tokens = list(compress(events.tokens, kept))
    events.logprobs = list(compress(events.logprobs, kept))
    events.count = [int(keep) for keep in kept]
    events.finish = [finish if keep else Finish.STOP for finish, keep in zip(events.finish, kept, strict=True)]
    return events


def _add_logprobs(
    events: StepEvents, at: NDArray[np.intp], tops: Int32, logprobs: NDArray[np.float32], result: StepResult
) -> None:
    if not (tops >= 0).any():
        return
    events.logprobs = np.where(tops >= 0, logprobs[at], 0.0).tolist()
    if result.top_ids is None or result.top_logprobs is None:
        return
    for i in np.flatnonzero(tops > 0):
        k, s = int(tops[i]), int(at[i])
        best = zip(result.top_ids[s, :k].tolist(), result.top_logprobs[s, :k].tolist(), strict=True)
        events.top[int(i)] = [list(best)]
