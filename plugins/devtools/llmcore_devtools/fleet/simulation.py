"""The front of a simulated fleet: it asks the balancer, hears reports late, and notices deaths by their silence.

The front knows at once what it sends, and sees the first and the last token of each answer. All else it knows from
reports.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple

from llmcore.api.balancing import Arrival, Balancer, Candidate
from llmcore.fleet.hits import CHUNK, Hits

from llmcore_devtools.fleet.replica import Replica
from llmcore_devtools.fleet.traces import Trace

REPORT = 0.25
"""Seconds between two reports of a replica's load."""

SILENCE = 0.75
"""Seconds without a report after which the front takes a replica for dead, and sends its requests elsewhere."""

WARM = 0.2
"""The share of the calls at the beginning of which the times do not count, because all caches are empty."""

CROWD = 10
"""Fewer calls than this in a window between two reports say nothing about a herd."""


@dataclass(frozen=True)
class Outcome:
    """The result of a trace. Times are in seconds."""

    first_tokens: Sequence[float]
    """From arrival to the first token, by arrival, without the first fifth."""
    hit: float
    """The share of all prompt tokens that caches had."""
    crowd: float
    """The largest share of the calls in a window between two reports that one replica got."""
    busiest: float
    """The largest share of all calls that one replica got, times the number of replicas."""
    to_dead: int
    """Calls that were sent to a dead replica."""
    late: int
    """Those of them that were sent more than a second after its death."""

    def quantile(self, share: float) -> float:
        """The time to the first token that `share` of the calls do not exceed."""
        ordered = sorted(self.first_tokens)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


class _Event(NamedTuple):
    time: float
    order: int
    kind: str
    replica: int
    life: int
    """The replica's life in which the event happens; a death ends a life, and with it all its events."""
    number: int


class _Place:
    """A replica as the front knows it."""

    def __init__(self, index: int, replica: Replica) -> None:
        self.name = f"replica-{index}"
        self.replica = replica
        self.life = 0
        self.alive = True
        self.died = 0.0
        self.heard = 0.0
        """The time of its last report."""
        self.listed = True
        self.sent: dict[int, tuple[float, int]] = {}
        """Requests that it has not answered -> the time at which they were sent, and their uncached tokens."""
        self.latency = 0.0
        self.got = 0


class Simulation:
    """One run of a trace. All events with equal times happen in the order in which they were planned."""

    def __init__(self, trace: Trace, balancer: Balancer) -> None:
        self._calls, self._balancer = trace.calls, balancer
        self._machines, self._deaths = trace.fleet.machines, trace.fleet.deaths
        self._places = [_Place(index, Replica(machine)) for index, machine in enumerate(self._machines)]
        self._candidates: list[Candidate] = []
        self._listed: list[int] = []
        """The index of each candidate's place."""
        self._position: dict[str, int] = {}
        self._hits = Hits(sum(machine.kv for machine in self._machines) // CHUNK)
        self._events: list[_Event] = []
        self._order = count()
        self._now = 0.0
        self._first: dict[int, float] = {}
        self._done = 0
        self._cached = self._prompts = 0
        self._to_dead = self._late = 0
        self._window: Counter[int] = Counter()
        self._crowd = 0.0

    def run(self) -> Outcome:
        """Plays the trace until every call is answered."""
        handlers = {
            "report": self._report,
            "computed": self._computed,
            "finished": self._finished,
            "death": self._death,
            "birth": self._birth,
        }
        for index, (death, birth) in self._deaths.items():
            self._plan(death, "death", index)
            self._plan(birth, "birth", index)
        self._plan(0.0, "report", 0)
        arriving = 0
        while self._done < len(self._calls):
            due = self._calls[arriving].time if arriving < len(self._calls) else float("inf")
            if due < self._events[0].time:
                self._now = due
                self._send(arriving)
                arriving += 1
                continue
            event = heapq.heappop(self._events)
            self._now = event.time
            if event.life == self._places[event.replica].life or event.kind in ("report", "death", "birth"):
                handlers[event.kind](event)
        warm = int(WARM * len(self._calls))
        busiest = max(place.got for place in self._places) / len(self._calls) * len(self._places)
        times = [self._first[number] for number in range(warm, len(self._calls))]
        return Outcome(times, self._cached / self._prompts, self._crowd, busiest, self._to_dead, self._late)

    def _plan(self, time: float, kind: str, replica: int, number: int = 0) -> None:
        life = self._places[replica].life
        heapq.heappush(self._events, _Event(time, next(self._order), kind, replica, life, number))

    def _send(self, number: int) -> None:
        call = self._calls[number]
        chunks = call.chunks(call.prompt)
        candidates = self._candidates.copy()
        for name, tokens in self._hits.found(chunks).items():
            position = self._position.get(name)
            if position is not None:
                was = candidates[position]
                candidates[position] = _with(was, was.waiting, was.requests, min(tokens, call.prompt - 1))
        position = self._balancer.choose(Arrival(call.prompt, chunks[0] if chunks else call.own), candidates)
        chosen, place = candidates[position], self._places[self._listed[position]]
        self._hits.sent(place.name, chunks)
        waiting, requests = chosen.waiting + call.prompt - chosen.hit, chosen.requests + 1
        self._candidates[position] = _with(chosen, waiting, requests)
        self._window[self._listed[position]] += 1
        place.sent[number] = self._now, call.prompt - chosen.hit
        place.got += 1
        if place.alive:
            place.replica.add(number, call)
            self._start(self._listed[position])
        else:
            self._to_dead += 1
            self._late += self._now - place.died > 1.0

    def _start(self, index: int) -> None:
        replica = self._places[index].replica
        seconds = replica.start()
        if seconds is None:
            return
        self._plan(self._now + seconds, "computed", index)
        for running in replica.computing:
            self._cached += running.hit
            self._prompts += running.work.prompt

    def _computed(self, event: _Event) -> None:
        place = self._places[event.replica]
        for running, seconds in place.replica.computed():
            self._change(place, waiting=place.sent[running.number][1])
            self._first.setdefault(running.number, self._now - self._calls[running.number].time)
            self._plan(self._now + seconds, "finished", event.replica, running.number)
        self._start(event.replica)

    def _change(self, place: _Place, waiting: int = 0, requests: int = 0) -> None:
        """The front sees that a place has computed or answered something."""
        position = self._position.get(place.name)
        if position is not None:
            was = self._candidates[position]
            left = max(0, was.waiting - waiting), max(0, was.requests - requests)
            self._candidates[position] = _with(was, *left)

    def _finished(self, event: _Event) -> None:
        place = self._places[event.replica]
        place.replica.finish(event.number)
        self._change(place, requests=1)
        took = self._now - place.sent.pop(event.number)[0]
        place.latency = 0.9 * place.latency + 0.1 * took if place.latency else took
        self._done += 1
        self._start(event.replica)

    def _report(self, event: _Event) -> None:
        """Every live replica reports. The candidates are those that were heard lately."""
        total = sum(self._window.values())
        if total >= CROWD:
            self._crowd = max(self._crowd, max(self._window.values()) / total)
        self._window.clear()
        before = dict(zip(self._listed, self._candidates, strict=True))
        self._candidates, self._listed = [], []
        orphans: list[int] = []
        for index, place in enumerate(self._places):
            if place.alive:
                place.heard, place.listed = self._now, True
            elif place.listed and self._now - place.heard >= SILENCE:
                place.listed = False
                self._hits.lost(place.name)
                orphans += place.sent
                place.sent = {}
            if place.listed:
                self._candidates.append(_candidate(place) if place.alive else before[index])
                self._listed.append(index)
        self._position = {candidate.name: index for index, candidate in enumerate(self._candidates)}
        for number in orphans:
            self._send(number)
        self._plan(self._now + REPORT, "report", 0)

    def _death(self, event: _Event) -> None:
        place = self._places[event.replica]
        place.alive, place.died = False, self._now
        place.life += 1

    def _birth(self, event: _Event) -> None:
        place = self._places[event.replica]
        place.alive = True
        place.replica = Replica(place.replica.machine)


def _candidate(place: _Place) -> Candidate:
    """The report of a place."""
    replica = place.replica
    return Candidate(
        name=place.name,
        waiting=replica.waiting,
        requests=replica.requests,
        kv_live=replica.live,
        kv_total=replica.machine.kv,
        latency=place.latency,
    )


def _with(was: Candidate, waiting: int, requests: int, hit: int = 0) -> Candidate:
    """`was` with other figures. dataclasses.replace takes three times as long, which is felt with 300 candidates."""
    kv, total = was.kv_live, was.kv_total
    return Candidate(was.name, waiting, requests, kv, total, hit, was.speed, was.latency)


def simulate(trace: Trace, balancer: Balancer) -> Outcome:
    """Plays `trace` with `balancer`. Deterministic: a balancer draws from the random.Random that it was made with."""
    return Simulation(trace, balancer).run()
