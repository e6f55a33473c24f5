"""A request's state: what it asked for, its choices, where each of them stands, and the queue.

A choice that waits is a `Choice` in the `WaitingQueue`. A choice that runs also has a row in the `RequestTable`. The
methods of this file are the only writers of what they count (tests/core/sched/test_request.py reads the sources).
"""

from __future__ import annotations

import itertools
import logging
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from llmcore.api.bridge import Prompt, Submit
from llmcore.api.protocols import Int32, Int64, LengthEstimator, RequestInfo, SchedulerLimits
from llmcore.kv.space import KVSpace
from llmcore.sched.beam_search import Beams, searching
from llmcore.sched.processors import CLIENTS_FAULT, ChoiceProcessors, Reason

logger = logging.getLogger(__name__)

NO_ROW = -1

NO_TOKEN = -1

STOP_COLUMNS = 8
"""Stop ids compared at once; the stop ids of a request with as many or more are looked up one by one."""

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

    row: int
    """The row of the request that loads."""
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
    """Those that have not ended. Of a request that begins, choice 0 stands for all of them until the prompt is
    computed."""
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
        """A request that has just come, with its first choice, or with those that continue; `arrival` orders choices.

        Raises ValueError for a source that writes what the model has to compute.
        """
        begun = submit.produced or {0: ()}
        # Several choices share no more than the prompt.
        known = len(submit.prompt) + (max(map(len, begun.values())) if len(begun) == 1 else 0)
        if source is not None and (submit.private or not 0 < source.tokens < known):
            raise ValueError(f"a source cannot write {source.tokens} of these {known} tokens")
        request = Request(
            submit=submit if submit.beams is None else searching(submit),
            owner=owner,
            info=RequestInfo(submit.priority, submit.client, submit.hints),
            processors=processors,
            beams=None if submit.beams is None else Beams(submit),
            source=source,
            private=submit.private,
            report=PromptReport(len(submit.prompt) - 1, submit.prompt_top) if submit.prompt_logprobs else None,
        )
        forks = 0 if submit.produced else submit.choices - 1
        for number, tokens in begun.items():
            request.choices[number] = Choice(request, number, arrival + number, forks, np.array(tokens, np.int32))
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
    queued_at: int = 0
    """The step before which it joined the queue."""
    waits: tuple[int, int, int] | None = None
    """(row, epoch, tokens) of the choice whose KV it waits for."""
    untried: int = 0
    """Failed steps that it was in and could not be tried alone after."""

    @property
    def ended(self) -> bool:
        """True if it has ended, or went back to the prompt as a beam."""
        return self.request.choices.get(self.number) is not self

    @property
    def together(self) -> list[Choice]:
        """The choices that come and go with it: itself, or all beams of its search. None if it has ended."""
        alive = self.request.choices.values()
        return [choice for choice in alive if choice is self or self.request.beams is not None]

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
        self._returned: dict[int, Choice] = {}
        self.fresh: OrderedDict[int, Choice] = OrderedDict()
        """Those that have not run yet, by arrival, in that order."""

    def __len__(self) -> int:
        return len(self._returned) + len(self.fresh)

    def __iter__(self) -> Iterator[Choice]:
        return itertools.chain((self._returned[arrival] for arrival in sorted(self._returned)), self.fresh.values())

    def append(self, choice: Choice) -> None:
        """A new request."""
        self.fresh[choice.arrival] = choice
        self._count(choice, 1)

    def give_back(self, choice: Choice) -> None:
        """A choice that ran already goes before all that did not."""
        self._returned[choice.arrival] = choice
        self._count(choice, 1)

    def remove(self, choice: Choice) -> None:
        """The choice was admitted, or ended. KeyError if it does not wait."""
        if self.fresh.pop(choice.arrival, None) is None:
            del self._returned[choice.arrival]
        self._count(choice, -1)

    def _count(self, choice: Choice, sign: int) -> None:
        self.places += sign * choice.places
        self.tokens += sign * choice.size


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
        """The first stop ids, NO_TOKEN behind the last."""
        self.tops = np.full(rows, -1, np.int32)
        """Best log-probabilities asked for; -1: none, not even the drawn token's."""
        self.foreseen = np.zeros(rows, np.int32)
        """Tokens that the length estimator last expected it to produce in all."""
        self.forking: dict[int, list[int]] = {}
        """Of the rows whose choices stand for more: the rows that their forks will take."""
        self.processors: dict[int, ChoiceProcessors] = {}
        """Of the rows that have logits processors."""
        self.beams: dict[int, Beams] = {}
        """Of the rows that are beams of a search."""
        self.renewed: dict[int, bool] = {}
        """Rows whose tokens the device does not know, and whether their table row is new to it as well."""
        self.probing: set[int] = set()
        """Rows whose prompt's log-probabilities, hidden states or score are wanted."""
        self.leases: dict[int, Lease] = {}
        """Of the rows that are loading."""
        self.choices: list[Choice | None] = [None] * rows
        self._of_rows: tuple[dict[int, Any], ...] = (
            self.forking,
            self.processors,
            self.beams,
            self.renewed,
            self.leases,
        )
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
        if choice.forks:
            self.forking[row] = [self._free.pop() for _ in range(choice.forks)]
            self.status[self.forking[row]] = RESERVED
        self._describe(row, choice)
        self.renewed[row] = True
        self.tokens[row, : choice.size] = choice.tokens()
        self.prefill[row] = self.length[row] = self.known[row] = choice.size
        self.computed[row] = self.settled[row] = self.taken[row] = self.entered[row] = cached

    def load(self, row: int, lease: Lease) -> None:
        """A source writes the KV of the admitted choice in `row`, which runs when that is done."""
        self._set_status(row, LOADING)
        self.leases[row] = lease

    def loaded(self, row: int) -> None:
        """The source has written all of it."""
        lease = self.leases.pop(row)
        self.computed[row] = self.settled[row] = lease.end
        self.choice(row).request.loaded = True
        self._set_status(row, RUNNING)

    def enqueue(self, rows: Int32, ends: Int32, most: Int32) -> Int32:
        """A step computes `rows` up to `ends` tokens. It gives those that it completes at most `most` tokens each;
        returns their numbers."""
        self.computed[rows] = ends
        complete = np.flatnonzero(ends >= self.length[rows]).astype(np.int32)
        self.length[rows[complete]] += most[complete]
        return complete

    def enter(self, row: int, tokens: int) -> None:
        """The KV of the first `tokens` tokens is in the prefix cache."""
        self.entered[row] = tokens

    def fork(self, choice: Choice) -> list[Choice]:
        """The choices that share the prompt of `choice` run from now on in the rows reserved for them.

        Returns the new ones.
        """
        row, request = choice.row, choice.request
        twins = []
        for number, at in enumerate(self.forking.pop(row), start=1):
            twin = request.choices[number] = Choice(request, number, choice.arrival + number, row=at)
            self._describe(at, twin)
            self.take_over(row, at)
            self.foreseen[at] = self.foreseen[row]
            twins.append(twin)
        choice.forks = 0
        return twins

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
        self._set_status(row, LEAVING)

    def end(self, row: int) -> None:
        """Give up a row and those reserved for its choice's forks; results on their way are dropped."""
        self.choice(row).row = NO_ROW
        for place in (*self.forking.get(row, ())[::-1], row):
            self._set_status(place, FREE)
            self.epoch[place] += 1
            self.choices[place] = None
            self.probing.discard(place)
            self._free.append(place)
            for values in self._of_rows:
                values.pop(place, None)

    def _describe(self, row: int, choice: Choice) -> None:
        request, submit = choice.request, choice.request.submit
        self.choices[row] = choice
        if choice.processors is not None:
            self.processors[row] = choice.processors
        if request.beams is not None:
            self.beams[row] = request.beams
        if choice.number == 0 and (request.report is not None or submit.pool or submit.score):
            self.probing.add(row)
        self._set_status(row, RUNNING)
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
        self.tops[row] = -1 if submit.sampling.logprobs is None else submit.sampling.logprobs

    def _set_status(self, row: int, status: int) -> None:
        self.status[row] = status
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
        """A request has come: its first choice waits, or all that continue do."""
        self.requests[request.key] = request
        for choice in request.choices.values():
            choice.queued_at = self.step
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

    # --- a choice leaves its row -----------------------------------------------------------------------------------
    # It offers what is valid of its KV to the prefix cache, then lets go of it.

    def preempt(self, row: int, valid: int | None = None) -> None:
        """The choice in `row` gives up its slots. It goes back to the queue when its last step was read.

        `valid`: only the KV of its first tokens counts, and it goes back at once, without what is on its way.
        A beam's search goes back as a whole, to its prompt: what it found so far is not kept.
        """
        table, choice = self.table, self.table.choice(row)
        for member in choice.together:
            self._let_go(member.row, valid)
        if choice.request.beams is not None:
            self._restart(choice.request, choice.request.beams)
        elif valid is None and table.length[row] > table.known[row]:
            table.leave(row)
        else:
            self.requeue(row)

    def requeue(self, row: int) -> None:
        """The choice in `row`, which holds no KV any more, goes back to the queue with the tokens that are known."""
        table, choice = self.table, self.table.choice(row)
        choice.produced = table.tokens[row, len(choice.request.prompt) : table.known[row]].copy()
        table.end(row)
        choice.queued_at = self.step
        self.queue.give_back(choice)

    def unplace(self, choice: Choice) -> None:
        """The choice was given a row in this step and does not get to run; it never left the queue."""
        self._let_go(choice.row)
        self.table.end(choice.row)

    def end(self, choice: Choice, valid: int | None = None) -> None:
        """The choice is done, wherever it stands; at most its first `valid` tokens stay in the prefix cache.

        With a beam, all other beams of its search are done.
        """
        for member in choice.together:
            if member.row == NO_ROW:
                self.queue.remove(member)
            else:
                self._let_go(member.row, valid)
                self.table.end(member.row)
            if member.processors is not None:
                member.processors.dropped = True
            del member.request.choices[member.number]
            if not member.request.choices:
                del self.requests[member.request.key]

    def fail(self, choice: Choice, error: Reason, valid: int | None = None) -> None:
        """`end` it, because of `error`: this is where such a request is counted, and named in the log."""
        if error[0] == CLIENTS_FAULT:
            logger.info("request %s asked for what cannot be done", choice.name)
        else:
            self.totals.failed_requests += 1
            logger.error(
                "request %s ended with an error: %s",
                choice.name,
                error[1],
                exc_info=None if choice.processors is None else choice.processors.cause,
            )
        self.end(choice, valid)

    def _let_go(self, row: int, valid: int | None = None) -> None:
        """Free the slots of `row`. The prefix cache may keep the KV of steps that were read, and the part of the
        prompt that it has already. It keeps at most the first `valid` tokens."""
        table, space = self.table, self.space
        lease = table.leases.get(row)
        if lease is not None:
            lease.source.cancel(lease)
        elif table.status[row] != RUNNING:
            return
        salt = table.choice(row).request.submit.salt
        most = int(max(table.settled[row], table.entered[row]))
        if valid is not None and valid < most:
            # A twin may have put more of what it holds into the cache: pass by there too before letting go.
            space.match(salt, table.content(row, int(table.known[row])))
            most = valid
        space.release(row, salt, table.content(row, most))

    def _restart(self, request: Request, beams: Beams) -> None:
        first = request.choices[0]
        beams.restart()
        for member in request.choices.values():
            self.table.end(member.row)
        request.choices = {0: first}
        first.forks = beams.width - 1
        first.queued_at = self.step
        self.queue.give_back(first)
