"""Balancers: the default, which adds one cost in tokens, and rules of other servers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from hashlib import blake2b
from random import Random

from llmcore.api import BalancerSpec, hookimpl
from llmcore.api.balancing import Arrival, Candidate

KV_WEIGHT = 0.01
"""Tokens of prompt that take as long as the slower steps that one token in KV causes.

`benchmarks/fleet.py --replicas 40 --requests 5000 --traces memory plain --kv_weights 0 0.003 0.01 0.03 0.1 0.3` gives
these 99th percentiles of seconds to the first token, in this order:
- memory: 0.655, 0.583, 0.580, 0.588, 0.586, 0.617
- plain: 0.133, 0.133, 0.134, 0.144, 0.148, 0.156
"""

SCARCE = 16.0
"""The weight of a prompt's uncached share, beside the least time for which prompts wait anywhere. While prompts wait
everywhere, others wait longer for all that is computed again.

`benchmarks/fleet.py --traces turns --replicas 2 --requests 1200 --senders 8 --scarce 0 2 4 8 16` gives these shares of
prompt tokens that caches had: 66.1, 73.6, 74.4, 74.1 and 74.2 %. One replica with half of the requests has 75.5 %. Two
engines on H200s had 56.1, 65.9 and 67.4 % with 0, 8 and 16, and one had 69.9 % (`benchmarks/replicas.py`).
"""

FEW = 64
"""The most candidates of which all are compared."""

SAMPLE = 4
"""Candidates without a hit that are compared if there are more."""


class Cost:
    """The least work before the first token: prompts that wait, the uncached part of this one, and KV in use. The more
    prompts wait everywhere, the more a hit counts.

    Requests that begin alike go to the same of several equal places. Among many places, it compares those with a hit
    and a few others at random.
    """

    def __init__(self, random: Random, kv_weight: float = KV_WEIGHT, scarce: float = SCARCE) -> None:
        self._random, self._kv_weight, self._scarce = random, kv_weight, scarce

    def choose(self, arrival: Arrival, candidates: Sequence[Candidate]) -> int:
        """See Balancer."""
        among: Iterable[int] = range(len(candidates))
        if len(candidates) > FEW:
            hits = [index for index, candidate in enumerate(candidates) if candidate.hit]
            among = {*hits, *(self._random.randrange(len(candidates)) for _ in range(SAMPLE))}
        wait = min(candidates[index].waiting / candidates[index].speed for index in among)
        again = self._scarce * wait / max(arrival.tokens, 1)
        costs = {index: self._cost(arrival, candidates[index], again) for index in among}
        least = min(costs.values())
        equal = [index for index, cost in costs.items() if cost == least]
        return max(equal, key=lambda index: _preference(arrival.key, candidates[index].name))

    def _cost(self, arrival: Arrival, place: Candidate, again: float) -> float:
        uncached = arrival.tokens - place.hit
        return (place.waiting + uncached + self._kv_weight * place.kv_live) / place.speed + again * uncached


def _preference(key: int, name: str) -> bytes:
    """A rendezvous hash. When a place comes or goes, only the keys that prefer it move."""
    return blake2b(name.encode(), key=key.to_bytes(9, "little", signed=True), digest_size=8).digest()


class RoundRobin:
    """One place after the other."""

    def __init__(self, random: Random) -> None:
        self._next = random.randrange(1 << 16)

    def choose(self, arrival: Arrival, candidates: Sequence[Candidate]) -> int:
        """See Balancer."""
        self._next += 1
        return self._next % len(candidates)


class LeastRequests:
    """The fewest requests that wait or run there; at random among equals."""

    def __init__(self, random: Random) -> None:
        self._random = random

    def choose(self, arrival: Arrival, candidates: Sequence[Candidate]) -> int:
        """See Balancer."""
        counts = [candidate.requests for candidate in candidates]
        least = min(counts)
        return self._random.choice([index for index, count in enumerate(counts) if count == least])


class PrefixOrLeastLoaded:
    """The longest hit, unless it is short or the places' requests differ much: then the fewest requests."""

    SHORT = 0.3
    """The share of the prompt above which a hit counts."""
    APART, TIMES = 64, 1.5
    """Requests by which the fullest place may exceed the emptiest: in number, and as a ratio."""

    def __init__(self, random: Random) -> None:
        self._least = LeastRequests(random)

    def choose(self, arrival: Arrival, candidates: Sequence[Candidate]) -> int:
        """See Balancer."""
        counts = [candidate.requests for candidate in candidates]
        hits = [candidate.hit for candidate in candidates]
        best = hits.index(max(hits))
        uneven = max(counts) - min(counts) > self.APART and max(counts) > self.TIMES * min(counts)
        if uneven or hits[best] <= self.SHORT * arrival.tokens:
            return self._least.choose(arrival, candidates)
        return best


class BySpeed:
    """At random: a place that is twice as fast gets twice as many requests."""

    def __init__(self, random: Random) -> None:
        self._random = random

    def choose(self, arrival: Arrival, candidates: Sequence[Candidate]) -> int:
        """See Balancer."""
        (index,) = self._random.choices(range(len(candidates)), [candidate.speed for candidate in candidates])
        return index


class BetterOfTwo:
    """The better of two random places. The best of all would get every request until its figures change."""

    def __init__(self, random: Random, measure: Callable[[Candidate], float]) -> None:
        self._random, self._measure = random, measure

    def choose(self, arrival: Arrival, candidates: Sequence[Candidate]) -> int:
        """See Balancer."""
        two = self._random.sample(range(len(candidates)), min(2, len(candidates)))
        return min(two, key=lambda index: self._measure(candidates[index]))


def least_expected(random: Random) -> BetterOfTwo:
    """By requests and speed."""
    return BetterOfTwo(random, lambda place: place.requests / place.speed)


def least_observed(random: Random) -> BetterOfTwo:
    """By the time that answers took."""
    return BetterOfTwo(random, lambda place: place.latency)


@hookimpl
def register_balancers() -> Iterable[BalancerSpec]:
    """The default, and LMDeploy's three names beside rules of vLLM and SGLang."""
    for name, make, text in (
        ("cost", "Cost", "least work before the first token"),
        ("round_robin", "RoundRobin", "one place after the other"),
        ("least_requests", "LeastRequests", "fewest requests"),
        ("prefix_or_least_loaded", "PrefixOrLeastLoaded", "longest cached prefix, or fewest requests"),
        ("random", "BySpeed", "at random, by speed"),
        ("min_expected_latency", "least_expected", "better of two by requests and speed"),
        ("min_observed_latency", "least_observed", "better of two by the time of past answers"),
    ):
        yield BalancerSpec(name=name, make=f"{__name__}:{make}", summary=text)
