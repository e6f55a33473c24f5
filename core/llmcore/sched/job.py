"""What the scheduler knows of a request, apart from the columns of a running one, and the queue."""

from __future__ import annotations

import bisect
import itertools
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from llmcore.bridge import Submit
from llmcore.protocols import Int32, Int64, RequestInfo
from llmcore.sched.beams import Beams, searching
from llmcore.sched.bound import Bound

NO_ROW = -1

Float32 = NDArray[np.float32]


@dataclass(eq=False, slots=True)
class Job:
    """One choice of a request, or all of them (`forks` more) until the prompt that they share is computed.

    `row` is its place among the running, `reserved` the places its forks will take. `produced` holds the tokens it
    had when it was last sent back to the queue, `cached` the prompt tokens it did not have to compute at first.
    `waits`: (row, epoch, tokens) of the job whose KV it waits for. `private`: it takes nothing from the cache.
    `untried`: failed steps it was in and could not be tried alone after. `bounds`: the logits processors of each of
    the request's choices, () if it has none. `prompt_logprobs`: of all prompt tokens but the first, as far as they
    are known; None if nobody wants them (any more); `prompt_ranks`: how many tokens are likelier in the place of each,
    and one more; `prompt_top`: the best (ids, logprobs) [, k] there. `pooled`: the sum of the prompt's hidden states,
    as far as it is known. `beams`: the search that it is a beam of. `info`: the request's wishes for the scheduling
    policy.
    """

    submit: Submit
    owner: int
    choice: int
    arrival: int
    prompt: Int32
    forks: int = 0
    produced: Int32 = field(default_factory=lambda: np.empty(0, np.int32))
    row: int = NO_ROW
    reserved: list[int] = field(default_factory=list)
    cached: int = -1
    untried: int = 0
    ended: bool = False
    private: bool = False
    queued_at: int = 0
    waits: tuple[int, int, int] | None = None
    bounds: Sequence[Bound] = ()
    prompt_logprobs: Float32 | None = None
    prompt_ranks: Int32 | None = None
    prompt_top: tuple[Int32, Float32] | None = None
    pooled: Float32 | None = None
    beams: Beams | None = None
    info: RequestInfo = field(default_factory=RequestInfo)

    @property
    def size(self) -> int:
        """Tokens known when it is next admitted."""
        return self.prompt.size + self.produced.size

    @property
    def choices(self) -> int:
        """Places it takes among the running."""
        return 1 + self.forks

    @property
    def bound(self) -> Bound | None:
        """Its logits processors."""
        return self.bounds[self.choice] if self.bounds else None

    @property
    def ready(self) -> bool:
        """Whether its processors, and those of its forks, know what they want of the next token."""
        return all(bound.ready for bound in self.bounds[self.choice : self.choice + self.choices])

    @property
    def name(self) -> str:
        """What logs call it."""
        request = self.submit.request_id or f"{self.owner}/{self.submit.id}"
        return request if self.submit.n == 1 else f"{request}, choice {self.choice}"

    def tokens(self) -> Int32:
        """Prompt and what was produced."""
        return np.concatenate([self.prompt, self.produced]) if self.produced.size else self.prompt

    def content(self) -> Int64:
        """Content ids of `tokens`."""
        return self.tokens().astype(np.int64)

    def fork(self, choice: int, row: int) -> Job:
        """A further choice, which runs in `row`."""
        twin = Job(self.submit, self.owner, choice, self.arrival + choice, self.prompt, cached=self.cached)
        twin.row = row
        twin.bounds = self.bounds
        twin.beams = self.beams
        twin.info = self.info
        return twin


def new_job(submit: Submit, owner: int, arrival: int) -> Job:
    """A request that has just come."""
    prompt = np.frombuffer(submit.prompt, "<i4").astype(np.int32)
    info = RequestInfo(submit.priority, submit.client, submit.hints)
    job = Job(submit, owner, 0, arrival, prompt, forks=submit.n - 1, info=info)
    if submit.beams is not None:
        job.submit, job.beams, job.forks = searching(submit), Beams(submit), submit.beams.width - 1
    if submit.prompt_logprobs:
        # What comes from the cache was computed for somebody else, who kept no log-probabilities.
        job.private = True
        job.prompt_logprobs = np.full(prompt.size - 1, np.nan, np.float32)
        job.prompt_ranks = np.zeros(prompt.size - 1, np.int32)
        if submit.prompt_top:
            shape = prompt.size - 1, submit.prompt_top
            job.prompt_top = np.zeros(shape, np.int32), np.full(shape, np.nan, np.float32)
    if submit.pool == "mean":
        job.private = True  # nor did anybody keep hidden states
    return job


class WaitingQueue:
    """Requests that wait: those sent back, oldest first, then the others in order of arrival.

    `choices` and `tokens`: of all of them, those to compute when they are admitted.
    """

    def __init__(self) -> None:
        self.choices = 0
        self.tokens = 0
        self._returned: list[Job] = []
        self._fresh: OrderedDict[int, Job] = OrderedDict()
        self._weights: dict[int, tuple[int, int]] = {}

    def __len__(self) -> int:
        return len(self._returned) + len(self._fresh)

    def __iter__(self) -> Iterator[Job]:
        return itertools.chain(self._returned, self._fresh.values())

    def append(self, job: Job) -> None:
        """A new request."""
        self._fresh[job.arrival] = job
        self._weigh(job)

    def fresh(self) -> Iterator[Job]:
        """Those that have not run yet, in order of arrival."""
        return iter(self._fresh.values())

    def give_back(self, job: Job) -> None:
        """A request that ran already goes before all that did not."""
        bisect.insort(self._returned, job, key=_arrival)
        self._weigh(job)

    def remove(self, job: Job) -> None:
        """The request was admitted, or ended. KeyError if it does not wait."""
        if self._fresh.pop(job.arrival, None) is None:
            at = bisect.bisect_left(self._returned, job.arrival, key=_arrival)
            if at == len(self._returned) or self._returned[at] is not job:
                raise KeyError(job.arrival)
            del self._returned[at]
        choices, tokens = self._weights.pop(job.arrival)
        self.choices -= choices
        self.tokens -= tokens

    def _weigh(self, job: Job) -> None:
        # A job's forks are counted anew where it is given a place, so what was added is kept for its removal.
        choices, tokens = self._weights[job.arrival] = job.choices, job.size
        self.choices += choices
        self.tokens += tokens


def _arrival(job: Job) -> int:
    return job.arrival
