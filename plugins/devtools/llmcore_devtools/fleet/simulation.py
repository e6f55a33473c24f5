"""The senders of a simulated fleet: they ask balancers, hear reports late, and notice deaths by their silence.

A sender knows at once what it sends, and sees the first and the last token of each answer. If the senders tell each
other of their calls, it knows at once of those too. All else it knows from reports.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple

from llmcore.api.balancing import Arrival, Balancer, Candidate
from llmcore.fleet.hits import Hits

from llmcore_devtools.fleet.replica import Replica
from llmcore_devtools.fleet.traces import Call, Trace

REPORT = 0.25
"""Seconds between two reports of a replica's load."""

SILENCE = 0.75
"""Seconds without a report after which the senders take a replica for dead, and send its requests elsewhere."""

WARM = 0.2
"""The share of the calls at the beginning of which the times do not count, because all caches are empty."""

HERD = 3.0
"""A balancer sends a herd if `Outcome.herd` exceeds this.

It is worth while to wait for a cached prefix as long as this takes less time than the prefix would: behind at most
4,096 tokens, the longest prefix that calls of several clients share here. A replica computes 2,000 tokens between two
reports. So about 6,000 may go to one replica for good reasons, which is three times what it computes. Calls that all
went where the last report was best would bring one replica the work of all.
"""


@dataclass(frozen=True)
class Outcome:
    """The result of a trace. Times are in seconds."""

    first_tokens: Sequence[float]
    """From arrival to the first token, by arrival, without the first fifth."""
    hit: float
    """The share of all prompt tokens that caches had."""
    herd: float
    """The most work that one replica got between two reports while another had nothing to do, beside what a replica of
    usual speed computes in that time. Work is prompt tokens that are not cached; the longest prompt does not count,
    because one call is not a herd."""
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


_OF_THE_FLEET = ("arrival", "report", "death", "birth")
"""Kinds of events that are not of one life of a replica."""


class _Place:
    """A replica, and what the senders have in common of it."""

    def __init__(self, index: int, replica: Replica) -> None:
        self.index = index
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
        self.work = self.longest = 0
        """Uncached tokens of the calls since the last report, and of the longest of them."""

    @property
    def idle(self) -> bool:
        """True if it got nothing since the last report and has no prompt to compute."""
        return self.listed and self.alive and not (self.work or self.replica.queue or self.replica.computing)


class _Sender:
    """A balancer, and what it is told. `known`: of each place its last report, and the calls since then."""

    def __init__(self, balancer: Balancer, places: Sequence[_Place]) -> None:
        self.balancer = balancer
        self.hits = Hits()
        self.known = [Candidate(place.name, kv_total=place.replica.machine.kv) for place in places]
        self._named = {known.name: known for known in self.known}
        self.candidates = self.known

    def choose(self, call: Call, chunks: Sequence[int]) -> tuple[int, int]:
        """The number of the candidate that gets a call, and the tokens of its prompt that it has to compute."""
        found = self.hits.found(chunks)
        having = [self._named[name] for name in found]
        for known, tokens in zip(having, found.values(), strict=True):
            known.hit = tokens if tokens < call.prompt else call.prompt - 1
        chosen = self.balancer.choose(Arrival(call.prompt, chunks[0] if chunks else call.own), self.candidates)
        work = call.prompt - self.candidates[chosen].hit
        for known in having:
            known.hit = 0
        return chosen, work

    def report(self, place: _Place) -> None:
        """It hears of a place's load."""
        replica, known = place.replica, self.known[place.index]
        known.waiting, known.requests, known.kv_live = replica.waiting, replica.requests, replica.live
        known.latency = place.latency

    def sent(self, place: _Place, work: int, chunks: Sequence[int]) -> None:
        """A call went to a place, from here or from a sender that tells of it."""
        self.hits.sent(place.name, chunks, place.replica.machine.kv)
        self.count(place, work, 1, work)

    def count(self, place: _Place, waiting: int, requests: int, kv: int) -> None:
        """Something was sent to a place, or it has computed or answered something."""
        known = self.known[place.index]
        known.waiting = max(0, known.waiting + waiting)
        known.requests = max(0, known.requests + requests)
        known.kv_live = max(0, known.kv_live + kv)


class Simulation:
    """One run of a trace. All events with equal times happen in the order in which they were planned."""

    def __init__(self, trace: Trace, balancers: Sequence[Balancer], *, telling: bool) -> None:
        self._calls, self._telling = trace.calls, telling
        self._machines, self._deaths = trace.fleet.machines, trace.fleet.deaths
        self._places = [_Place(index, Replica(machine)) for index, machine in enumerate(self._machines)]
        self._listed: list[_Place] = []
        self._senders = [_Sender(balancer, self._places) for balancer in balancers]
        self._events: list[_Event] = []
        self._order = count()
        self._now = 0.0
        self._came: dict[int, float] = {}
        self._next = {call.after: number for number, call in enumerate(self._calls) if call.after is not None}
        self._first: dict[int, float] = {}
        self._done = 0
        self._cached = self._prompts = 0
        self._to_dead = self._late = 0
        self._herd = 0.0

    def run(self) -> Outcome:
        """Plays the trace until every call is answered."""
        handlers = {
            "arrival": self._arrival,
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
        arriving, alone = 0, len(self._calls) - len(self._next)
        while self._done < len(self._calls):
            due = self._calls[arriving].time if arriving < alone else float("inf")
            if due < self._events[0].time:
                self._now = due
                self._arrive(arriving)
                arriving += 1
                continue
            event = heapq.heappop(self._events)
            self._now = event.time
            if event.life == self._places[event.replica].life or event.kind in _OF_THE_FLEET:
                handlers[event.kind](event)
        warm = int(WARM * len(self._calls))
        busiest = max(place.got for place in self._places) / len(self._calls) * len(self._places)
        times = [self._first[number] for number in range(warm, len(self._calls))]
        return Outcome(times, self._cached / self._prompts, self._herd, busiest, self._to_dead, self._late)

    def _sender(self, number: int) -> _Sender:
        """The sender of a call: they take turns."""
        return self._senders[number % len(self._senders)]

    def _plan(self, time: float, kind: str, replica: int, number: int = 0) -> None:
        life = self._places[replica].life
        heapq.heappush(self._events, _Event(time, next(self._order), kind, replica, life, number))

    def _arrival(self, event: _Event) -> None:
        self._arrive(event.number)

    def _arrive(self, number: int) -> None:
        self._came[number] = self._now
        self._send(number)

    def _send(self, number: int) -> None:
        call, sender = self._calls[number], self._sender(number)
        chunks = call.chunks(call.prompt)
        chosen, work = sender.choose(call, chunks)
        place = self._listed[chosen]
        for one in self._senders if self._telling else (sender,):
            one.sent(place, work, chunks)
        place.sent[number] = self._now, work
        place.got += 1
        place.work += work
        place.longest = max(place.longest, work)
        if place.alive:
            place.replica.add(number, call)
            self._start(place)
        else:
            self._to_dead += 1
            self._late += self._now - place.died > 1.0

    def _start(self, place: _Place) -> None:
        seconds = place.replica.start()
        if seconds is None:
            return
        self._plan(self._now + seconds, "computed", place.index)
        for running in place.replica.computing:
            self._cached += running.hit
            self._prompts += running.work.prompt

    def _computed(self, event: _Event) -> None:
        place = self._places[event.replica]
        for running, seconds in place.replica.computed():
            self._sender(running.number).count(place, -place.sent[running.number][1], 0, 0)
            self._first.setdefault(running.number, self._now - self._came[running.number])
            self._plan(self._now + seconds, "finished", event.replica, running.number)
        self._start(place)

    def _finished(self, event: _Event) -> None:
        place = self._places[event.replica]
        place.replica.finish(event.number)
        sent, work = place.sent.pop(event.number)
        self._sender(event.number).count(place, 0, -1, -work)
        took = self._now - sent
        place.latency = 0.9 * place.latency + 0.1 * took if place.latency else took
        self._done += 1
        if (following := self._next.get(event.number)) is not None:
            self._plan(self._now + self._calls[following].time, "arrival", event.replica, following)
        self._start(place)

    def _report(self, event: _Event) -> None:
        """Every live replica reports. The candidates are those that were heard lately."""
        self._look_for_herd()
        orphans: list[int] = []
        for place in self._places:
            if place.alive:
                place.heard, place.listed = self._now, True
                for sender in self._senders:
                    sender.report(place)
            elif place.listed and self._now - place.heard >= SILENCE:
                place.listed = False
                for sender in self._senders:
                    sender.hits.lost(place.name)
                orphans += place.sent
                place.sent = {}
        self._listed = [place for place in self._places if place.listed]
        for sender in self._senders:
            sender.candidates = [sender.known[place.index] for place in self._listed]
        for number in orphans:
            self._send(number)
        self._plan(self._now + REPORT, "report", 0)

    def _look_for_herd(self) -> None:
        """Notes the work of the window that ends, and begins the next one."""
        if any(place.idle for place in self._places):
            for place in self._places:
                computes = place.replica.machine.prefill_rate * REPORT
                self._herd = max(self._herd, (place.work - place.longest) / computes)
        for place in self._places:
            place.work = place.longest = 0

    def _death(self, event: _Event) -> None:
        place = self._places[event.replica]
        place.alive, place.died = False, self._now
        place.life += 1

    def _birth(self, event: _Event) -> None:
        place = self._places[event.replica]
        place.alive = True
        place.replica = Replica(place.replica.machine)


def simulate(trace: Trace, *balancers: Balancer, telling: bool = True) -> Outcome:
    """Plays `trace` with one sender for each balancer. `telling`: each tells the others of its calls.

    Deterministic: a balancer draws from the random.Random that it was made with.
    """
    return Simulation(trace, balancers, telling=telling).run()
