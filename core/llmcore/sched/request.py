"""A request's state: what it asked for, its choices, where each of them stands, and the queue.

A choice that waits is a `Choice` in the `WaitingQueue`. A choice that runs also has a row in the `RequestTable`. The
methods of this file are the only writers of what they count (tests/core/sched/test_request.py reads the sources).
"""

from __future__ import annotations

import bisect
import itertools
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from llmcore.api.bridge import Prompt, Submit
from llmcore.api.protocols import Int32, Int64, LengthEstimator, RequestInfo, SchedulerLimits
from llmcore.kv.space import KVSpace
from llmcore.sched.beam_search import Beams, searching
from llmcore.sched.processors import ChoiceProcessors

NO_ROW = -1

NO_TOKEN = -1

STOP_COLUMNS = 8
"""Stop ids compared at once; the stop ids of a request with more are looked up one by one."""

Float32 = NDArray[np.float32]


class KVSource(Protocol):
    """A component that writes the KV of a request's beginning in place of the model. It is called on the engine's
    thread and must not block."""

    tokens: int
    """The number of first tokens, of the prompt and then of `Submit.produced`, whose KV it writes. The model has to
    compute the last token itself."""
    seconds: float
    """The longest time that it may take, from `begin` on."""

    def begin(self, lease: Lease) -> None:
        """The slots are there. When the last of them is written, `Scheduler.filled` is told."""

    def cancel(self, lease: Lease) -> None:
        """The slots are needed elsewhere, or the request has ended: after this call the source writes nothing."""


@dataclass(frozen=True, eq=False)
class Lease:
    """Slots that a source may write until the lease is filled, or cancelled."""

    number: int
    request: tuple[int, int]
    """(owner, id)"""
    start: int
    """The first token to write; the KV of those before it came from the prefix cache."""
    end: int
    """The token behind the last one to write."""
    granules: tuple[Int32, ...]
    """Per KV group, the granules of these tokens, beginning with the one that holds `start`."""
    expires: float
    """When it is taken back, as time.monotonic()."""
    source: KVSource


class PromptReport:
    """Log-probabilities of a prompt: its `places` tokens behind the first. Steps fill them in; NaN: not yet."""

    def __init__(self, places: int, top: int) -> None:
        self.logprobs: Float32 = np.full(places, np.nan, np.float32)
        self.ranks: Int32 = np.zeros(places, np.int32)
        """[places] the number of tokens that are likelier in the place, plus one."""
        self.top_ids: Int32 = np.zeros((places, top), np.int32)
        """[places, top] the best tokens in the place."""
        self.top_logprobs: Float32 = np.full((places, top), np.nan, np.float32)


@dataclass(eq=False, slots=True)
class Request:
    """A request: the state that all its choices share."""

    submit: Submit
    """The request as it was submitted; for a beam search, the request that is computed for each beam."""
    owner: int
    """The HTTP worker that gets its events."""
    info: RequestInfo
    """Its wishes for the scheduling policy."""
    processors: Sequence[ChoiceProcessors] = ()
    """By choice; () if it has no logits processors."""
    beams: Beams | None = None
    source: KVSource | None = None
    """Writes the KV of its beginning when it is first admitted; None afterwards, or where nothing does."""
    loaded: bool = False
    """Some of its KV came from a source."""
    choices: dict[int, Choice] = field(default_factory=dict)
    """Those that have not ended. Choice 0 stands for all of them until the prompt is computed."""
    private: bool = False
    """It takes nothing from the prefix cache."""
    cached: int = -1
    """Prompt tokens that came from the prefix cache at its first admission; -1 before that."""
    report: PromptReport | None = None
    """The log-probabilities of its prompt; None if the request did not ask for them, or they have been sent."""
    pooled: Float32 | None = None
    """The sum of the prompt's hidden states, as far as it is known."""

    @property
    def prompt(self) -> Prompt:
        """Its prompt."""
        return self.submit.prompt

    @property
    def key(self) -> tuple[int, int]:
        """(owner, id)."""
        return self.owner, self.submit.id

    def given(self, cached: int) -> int:
        """Tokens that the model does not compute, where `cached` come from the prefix cache."""
        return cached if self.source is None else max(cached, self.source.tokens)

    @staticmethod
    def of(
        submit: Submit,
        owner: int,
        arrival: int,
        processors: Sequence[ChoiceProcessors] = (),
        source: KVSource | None = None,
    ) -> Request:
        """A request that has just come, with its first choice; `arrival` orders choices.

        Raises ValueError for a source that writes what the model has to compute.
        """
        known = len(submit.prompt) + len(submit.produced)
        info = RequestInfo(submit.priority, submit.client, submit.hints)
        request = Request(submit, owner, info, processors)
        forks = submit.n - 1
        if submit.beams is not None:
            request.submit, request.beams, forks = searching(submit), Beams(submit), submit.beams.width - 1
        if submit.prompt_logprobs:
            # The prefix cache keeps KV and no log-probabilities.
            request.private = True
            request.report = PromptReport(len(submit.prompt) - 1, submit.prompt_top)
        if submit.pool == "mean":
            request.private = True  # nor does it keep hidden states
        if source is not None and (request.private or not 0 < source.tokens < known):
            raise ValueError(f"a source cannot write {source.tokens} of these {known} tokens")
        request.source = source
        request.choices[0] = Choice(request, 0, arrival, forks, np.array(submit.produced, np.int32))
        return request


@dataclass(eq=False, slots=True)
class Choice:
    """One choice of a request, or all of them (`forks` more) until the prompt that they share is computed."""

    request: Request
    number: int
    arrival: int
    forks: int = 0
    produced: Int32 = field(default_factory=lambda: np.empty(0, np.int32))
    """The tokens that it had when it joined the queue."""
    row: int = NO_ROW
    """Its place in the RequestTable."""
    reserved: list[int] = field(default_factory=list)
    """The rows that its forks will take."""
    queued_at: int = 0
    """The step before which it joined the queue."""
    waits: tuple[int, int, int] | None = None
    """(row, epoch, tokens) of the choice whose KV it waits for."""
    untried: int = 0
    """Failed steps that it was in and could not be tried alone after."""
    ended: bool = False

    @property
    def size(self) -> int:
        """Tokens known when it is next admitted."""
        return len(self.request.prompt) + self.produced.size

    @property
    def places(self) -> int:
        """Rows that it takes among the running."""
        return 1 + self.forks

    @property
    def processors(self) -> ChoiceProcessors | None:
        """Its logits processors."""
        return self.request.processors[self.number] if self.request.processors else None

    @property
    def all_processors(self) -> Sequence[ChoiceProcessors]:
        """Its logits processors and those of its forks."""
        return self.request.processors[self.number : self.number + self.places]

    @property
    def ready(self) -> bool:
        """True if its processors, and those of its forks, have said what they want of the next token."""
        return all(processors.ready for processors in self.all_processors)

    @property
    def name(self) -> str:
        """Its name in logs."""
        submit = self.request.submit
        name = submit.request_id or f"{self.request.owner}/{submit.id}"
        return name if submit.n == 1 else f"{name}, choice {self.number}"

    def miss_trial(self) -> None:
        """A step that it was in failed, and it could not be tried alone."""
        self.untried += 1

    def tokens(self) -> Int32:
        """Prompt and what was produced."""
        ids = self.request.prompt.ids
        return np.concatenate([ids, self.produced]) if self.produced.size else ids

    def content(self) -> Int64:
        """Content ids of `tokens`."""
        return self.request.prompt.content(self.tokens())


class WaitingQueue:
    """Choices that wait: those sent back, oldest first, then the others in order of arrival.

    `places`: rows that all of them will take. `tokens`: what they will compute when they are admitted.
    """

    def __init__(self) -> None:
        self.places = 0
        self.tokens = 0
        self._returned: list[Choice] = []
        self._fresh: OrderedDict[int, Choice] = OrderedDict()
        self._weights: dict[int, tuple[int, int]] = {}

    def __len__(self) -> int:
        return len(self._returned) + len(self._fresh)

    def __iter__(self) -> Iterator[Choice]:
        return itertools.chain(self._returned, self._fresh.values())

    def append(self, choice: Choice) -> None:
        """A new request."""
        self._fresh[choice.arrival] = choice
        self._weigh(choice)

    def fresh(self) -> Iterator[Choice]:
        """Those that have not run yet, in order of arrival."""
        return iter(self._fresh.values())

    def give_back(self, choice: Choice) -> None:
        """A choice that ran already goes before all that did not."""
        bisect.insort(self._returned, choice, key=_arrival)
        self._weigh(choice)

    def remove(self, choice: Choice) -> None:
        """The choice was admitted, or ended. KeyError if it does not wait."""
        if self._fresh.pop(choice.arrival, None) is None:
            at = bisect.bisect_left(self._returned, choice.arrival, key=_arrival)
            if at == len(self._returned) or self._returned[at] is not choice:
                raise KeyError(choice.arrival)
            del self._returned[at]
        places, tokens = self._weights.pop(choice.arrival)
        self.places -= places
        self.tokens -= tokens

    def _weigh(self, choice: Choice) -> None:
        # A choice's forks are counted anew where it is given a row, so what was added is kept for its removal.
        places, tokens = self._weights[choice.arrival] = choice.places, choice.size
        self.places += places
        self.tokens += tokens


def _arrival(choice: Choice) -> int:
    return choice.arrival


FREE, RESERVED, RUNNING, LEAVING, LOADING = range(5)
"""The states of a row. RESERVED: for a fork that does not run yet. LEAVING: its choice was preempted, and goes back to
the queue when its last step was read. LOADING: a source writes its KV, and it is in no step. Plain numbers, because
every step of steady decoding looks at them."""


class RequestTable:
    """Running choices as columns over rows: steady decoding touches nothing else.

    Counts are tokens of the sequence unless they say otherwise. `epoch` changes whenever a row is given up, so that a
    late result finds out that its choice has gone.
    """

    def __init__(self, rows: int, max_len: int) -> None:
        self.tokens = np.zeros((rows, max_len), np.int32)
        self.status = np.zeros(rows, np.int8)
        self.epoch = np.zeros(rows, np.int64)
        self.arrival = np.zeros(rows, np.int64)
        self.priority = np.zeros(rows, np.int64)
        self.owner = np.zeros(rows, np.int32)
        self.request = np.zeros(rows, np.int64)
        self.number = np.zeros(rows, np.int32)
        self.prompt_len = np.zeros(rows, np.int32)
        self.prefill = np.zeros(rows, np.int32)
        """Tokens known when it was admitted."""
        self.length = np.zeros(rows, np.int32)
        """All tokens, those sampled but not read yet included: an upper bound until they are read."""
        self.known = np.zeros(rows, np.int32)
        """Tokens on the host."""
        self.computed = np.zeros(rows, np.int32)
        """Tokens whose KV is written or enqueued: an upper bound as long as `length` is one."""
        self.settled = np.zeros(rows, np.int32)
        """Tokens whose KV was written by steps that were read: a lower bound."""
        self.limit = np.zeros(rows, np.int32)
        """The most tokens whose KV will ever be computed."""
        self.taken = np.zeros(rows, np.int32)
        """Tokens whose KV came from the prefix cache."""
        self.entered = np.zeros(rows, np.int32)
        """Tokens whose KV is in the prefix cache, put there by this choice or another."""
        self.max_new = np.zeros(rows, np.int32)
        self.min_new = np.zeros(rows, np.int32)
        self.stops = np.full((rows, STOP_COLUMNS), NO_TOKEN, np.int32)
        self.no_stop = np.zeros(rows, np.bool_)
        self.many_stops = np.zeros(rows, np.bool_)
        self.tops = np.full(rows, -1, np.int32)
        """Best log-probabilities asked for; -1: none, not even the drawn token's."""
        self.foreseen = np.zeros(rows, np.int32)
        """Tokens that the length estimator last expected it to produce in all."""
        self.forks = np.zeros(rows, np.int32)
        self.processors: dict[int, ChoiceProcessors] = {}
        """Of the rows that have logits processors."""
        self.beams: dict[int, Beams] = {}
        """Of the rows that are beams of a search."""
        self.renewed: dict[int, bool] = {}
        """Rows whose tokens the device does not know, and whether their table row is new as well."""
        self.probing: set[int] = set()
        """Rows whose prompt's log-probabilities, hidden states or score are wanted."""
        self.leases: dict[int, Lease] = {}
        """Of the rows that are loading."""
        self.choices: list[Choice | None] = [None] * rows
        self._free = list(range(rows - 1, -1, -1))
        self._running: Int32 | None = None

    @property
    def places(self) -> int:
        """Rows that are free."""
        return len(self._free)

    def peek(self, n: int) -> Int32:
        """The rows that the next choice with `n` places will take."""
        return np.array(self._free[: -n - 1 : -1], np.int32)

    def running(self) -> Int32:
        """Running rows, oldest first."""
        if self._running is None:
            rows = np.flatnonzero(self.status == RUNNING)
            self._running = rows[np.argsort(self.arrival[rows])].astype(np.int32)
        return self._running

    def holding(self) -> Int32:
        """Rows that hold KV: those that run, and those that are loading."""
        return np.append(self.running(), np.array([*self.leases], np.int32)) if self.leases else self.running()

    def choice(self, row: int) -> Choice:
        """The choice that has `row`."""
        choice = self.choices[row]
        assert choice is not None
        return choice

    def content(self, row: int, end: int, start: int = 0) -> Int64:
        """Content ids of a row's tokens from `start` to `end`."""
        return self.choice(row).request.prompt.content(self.tokens[row, start:end])

    def check(self) -> None:
        """Assert that the counts of every row are in order."""
        rows = np.flatnonzero(self.status == RUNNING)
        assert (self.settled[rows] <= self.computed[rows]).all(), "more was read than was enqueued"
        assert (self.known[rows] <= self.length[rows]).all(), "more tokens are known than there can be"
        assert (self.computed[rows] < self.length[rows]).all(), "KV of tokens that do not exist yet"
        enqueued = np.maximum(self.computed[rows], self.prefill[rows])
        assert (self.entered[rows] <= enqueued).all(), "KV is kept before it is computed"
        assert (self.computed[rows] <= self.limit[rows]).all(), "more is computed than will ever be needed"

    # --- transitions -------------------------------------------------------------------------------------------

    def foresee(self, rows: Int32, totals: Int32 | int) -> None:
        """`rows`, free ones included, are expected to produce `totals` tokens in all."""
        self.foreseen[rows] = totals

    def admit(self, choice: Choice, cached: int) -> None:
        """Give `choice` and its forks their rows; the KV of `cached` of its tokens is there already."""
        row = self._free.pop()
        choice.row = row
        choice.reserved = [self._free.pop() for _ in range(choice.forks)]
        self.status[choice.reserved] = RESERVED
        self._describe(row, choice)
        self.tokens[row, : choice.size] = choice.tokens()
        self.prefill[row] = self.length[row] = self.known[row] = choice.size
        self.computed[row] = self.settled[row] = self.taken[row] = self.entered[row] = cached
        self.forks[row] = choice.forks

    def load(self, row: int, lease: Lease) -> None:
        """A source writes the KV of the admitted choice in `row`, which runs when that is done."""
        self.status[row] = LOADING
        self.leases[row] = lease
        self._running = None

    def loaded(self, row: int) -> None:
        """The source has written all of it. The device has not heard of the row yet."""
        lease = self.leases.pop(row)
        self.computed[row] = self.settled[row] = lease.end
        self.choice(row).request.loaded = True
        self.status[row] = RUNNING
        self.renewed[row] = True
        self._running = None

    def enqueue(self, rows: Int32, ends: Int32) -> NDArray[np.intp]:
        """A step computes `rows` up to `ends` tokens; returns the numbers of those that sample."""
        self.computed[rows] = ends
        return np.flatnonzero(ends >= self.length[rows])

    def enter(self, row: int, tokens: int) -> None:
        """The KV of the first `tokens` tokens is in the prefix cache."""
        self.entered[row] = tokens

    def fork(self, choice: Choice) -> list[Choice]:
        """The choices that share the prompt of `choice` run from now on in the rows reserved for them.

        Returns the new ones.
        """
        row, request = choice.row, choice.request
        twins = []
        for number, at in enumerate(choice.reserved, start=1):
            twin = request.choices[number] = Choice(request, number, choice.arrival + number, row=at)
            self._describe(at, twin)
            self.take_over(row, at)
            self.foreseen[at] = self.foreseen[row]
            self.forks[at] = 0
            twins.append(twin)
        choice.reserved, choice.forks = [], 0
        self.forks[row] = 0
        return twins

    def sample(self, rows: Int32, most: Int32 | int) -> None:
        """A step that was enqueued gives each of `rows` at most `most` tokens."""
        self.length[rows] += most

    def postpone(self, row: int) -> None:
        """The last step that was enqueued samples nothing for `row`: its next row computes its last token again."""
        self.length[row] -= 1
        self.computed[row] -= 1

    def settle(self, rows: Int32, tokens: Int32) -> None:
        """A step was read that had computed `rows` up to `tokens` tokens."""
        self.settled[rows] = tokens

    def accept(self, rows: Int32, known: Int32, unused: Int32 | None = None) -> None:
        """A step was read after which `known` tokens of each of `rows` are known. It gave `unused` fewer than it might
        have given: the sequence is that much shorter than its upper bound was."""
        self.known[rows] = known
        self.settled[rows] = known - 1
        if unused is not None:
            self.length[rows] -= unused
            self.computed[rows] -= unused

    def write(self, rows: Int32, at: Int32, tokens: Int32) -> None:
        """Token `at` of each of `rows` was read; `accept` follows."""
        self.tokens[rows, at] = tokens

    def go_on(self, row: int, source: int, token: int) -> None:
        """A beam goes on as the beam in row `source` (maybe itself), whose tokens it has by now, with `token`."""
        known = int(self.known[row])
        self.tokens[row, known] = token
        self.known[row] = self.length[row] = known + 1
        self.renewed[row] = self.renewed.get(row, False) or source != row

    def take_over(self, source: int, row: int) -> None:
        """`row` has the tokens and counts of row `source` from now on."""
        size = int(self.computed[source])
        self.tokens[row, :size] = self.tokens[source, :size]
        for column in (self.prefill, self.length, self.known, self.computed, self.settled, self.taken, self.entered):
            column[row] = column[source]

    def leave(self, row: int) -> None:
        """Its choice was preempted, and goes back to the queue when its last step was read."""
        self.status[row] = LEAVING
        self._running = None

    def end(self, row: int) -> None:
        """Give up a row and those reserved for its choice's forks; results on their way are dropped."""
        choice = self.choice(row)
        for place in (*choice.reserved[::-1], row):
            self.status[place] = FREE
            self.epoch[place] += 1
            self.choices[place] = None
            self.processors.pop(place, None)
            self.beams.pop(place, None)
            self.renewed.pop(place, None)
            self.leases.pop(place, None)
            self.probing.discard(place)
            self._free.append(place)
        choice.reserved = []
        choice.row = NO_ROW
        self._running = None

    def _describe(self, row: int, choice: Choice) -> None:
        request, submit = choice.request, choice.request.submit
        self.choices[row] = choice
        if choice.processors is not None:
            self.processors[row] = choice.processors
        if request.beams is not None:
            self.beams[row] = request.beams
        if choice.number == 0 and (request.report is not None or submit.pool or submit.score):
            self.probing.add(row)
        self.status[row] = RUNNING
        self.arrival[row] = choice.arrival
        self.priority[row] = submit.priority
        self.owner[row] = request.owner
        self.request[row] = submit.id
        self.number[row] = choice.number
        self.prompt_len[row] = len(request.prompt)
        self.max_new[row] = submit.max_new_tokens
        self.min_new[row] = submit.min_new_tokens
        self.limit[row] = len(request.prompt) + submit.max_new_tokens - 1
        self.stops[row] = NO_TOKEN
        self.stops[row, : len(submit.stop_ids)] = submit.stop_ids[:STOP_COLUMNS]
        self.no_stop[row] = not submit.stop_ids
        self.many_stops[row] = len(submit.stop_ids) > STOP_COLUMNS
        self.tops[row] = -1 if submit.sampling.logprobs is None else submit.sampling.logprobs
        self._running = None


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
    """All requests of an engine, their KV, and the number of the next step."""

    limits: SchedulerLimits
    table: RequestTable
    space: KVSpace
    estimator: LengthEstimator
    ahead: int
    drafts: int
    """The most drafted tokens that a row verifies."""
    graph_rows: int
    """The most rows of a decode step that is captured; 0: none is."""
    queue: WaitingQueue = field(default_factory=WaitingQueue)
    requests: dict[tuple[int, int], Request] = field(default_factory=dict)
    """By (owner, id): those that have not ended."""
    step: int = 0
    totals: Totals = field(default_factory=Totals)

    def add(self, request: Request) -> None:
        """A request has come: its first choice waits."""
        choice = request.choices[0]
        choice.queued_at = self.step
        self.requests[request.key] = request
        self.queue.append(choice)

    def choices(self) -> list[Choice]:
        """All that have not ended."""
        return [choice for request in self.requests.values() for choice in request.choices.values()]

    def admitted(self, choice: Choice) -> None:
        """`choice`, which has its row, leaves the queue: it runs in the step that is being planned, or is loading."""
        request = choice.request
        request.source = None
        self.queue.remove(choice)
        choice.waits = None
        if request.cached < 0:
            request.cached = min(int(self.table.taken[choice.row]), len(request.prompt))
            self.totals.prompt_tokens += len(request.prompt)
            self.totals.cached_tokens += request.cached

    def preempt(self, row: int) -> None:
        """The choice in `row`, which holds no KV any more, goes back to the queue with the tokens that are known."""
        table = self.table
        choice = table.choice(row)
        choice.produced = table.tokens[row, len(choice.request.prompt) : table.known[row]].copy()
        table.end(row)
        self._requeue(choice)

    def restart(self, choice: Choice) -> None:
        """The first beam of a search, which holds no KV any more, goes back to the queue without the others."""
        request = choice.request
        assert request.beams is not None
        request.beams.restart()
        for member in list(request.choices.values()):
            self.table.end(member.row)
            member.ended = member is not choice
        request.choices = {0: choice}
        choice.forks = request.beams.width - 1
        self._requeue(choice)

    def end(self, choice: Choice) -> None:
        """`choice`, which holds no KV any more, has ended."""
        if choice.row == NO_ROW:
            self.queue.remove(choice)
        else:
            self.table.end(choice.row)
        choice.ended = True
        if choice.processors is not None:
            choice.processors.dropped = True
        del choice.request.choices[choice.number]
        if not choice.request.choices:
            del self.requests[choice.request.key]

    def _requeue(self, choice: Choice) -> None:
        choice.queued_at = self.step
        self.queue.give_back(choice)
