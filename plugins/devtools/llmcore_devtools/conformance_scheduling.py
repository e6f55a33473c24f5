"""Conformance of policies: schedulers, length estimators, prefix caches and balancers. No torch."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import cast

import numpy as np
from llmcore.api import specs
from llmcore.api.balancing import Arrival, Balancer, Candidate
from llmcore.api.protocols import (
    Decision,
    Int32,
    Int64,
    KVManager,
    LengthEstimator,
    SchedulerLimits,
    SchedulerPolicy,
    SchedulerView,
)
from llmcore.registry.loader import load
from llmcore.registry.registry import Registry
from llmcore.sched.policy import StepView, fault

from llmcore_devtools.conformance import all_problems, contributed, loaded
from llmcore_devtools.fleet import make_trace
from llmcore_devtools.fleet import simulate as simulate_fleet
from llmcore_devtools.simulator import Scenario, simulate

LIMITS = SchedulerLimits(max_running=8, max_input_len=255, max_total_len=256, batch_tokens=64, chunk_tokens=32)

SCENARIOS = (
    Scenario(seed=1),
    Scenario(seed=2, ahead=1, aborts=0.02, finishes=0.02),
    Scenario(seed=3, ahead=1, granules=(1, 4), slots=128),
    Scenario(seed=4, chunked=False, wait_steps=2, batch_tokens=48),
    Scenario(seed=5, failures=0.02, poisoned=0.1, slots=128),
    Scenario(seed=8, chunked=False, batch_tokens=48),
    Scenario(seed=9, ahead=1, stall_tokens=8, arrivals=0.9),
    Scenario(seed=10, ahead=1, slots=128, arrivals=0.9, priorities=(-3, 0, 7)),
    Scenario(seed=11, ahead=1, drafts=4, loads=0.3),
)
"""Random traces with steps ahead, clients that leave, two KV groups, little room, whole prompts, failing steps,
priorities and drafts. In one, prompts may not keep answers waiting; in another, a source writes the KV of prompts."""

FLEET_LENGTHS = ((20, 100), (150, 300), (1_000, 200))
"""Tokens of prompts and answers of the requests by which balancers are checked."""


def check_register_length_estimators(registry: Registry, plugin: str, samples: Sequence[Path] = ()) -> int:
    """Every estimate lies between what is produced and what is allowed, with and without history."""
    estimators = contributed(registry, plugin, specs.LengthEstimatorSpec)
    random = np.random.default_rng(0)
    with all_problems() as problems:
        for spec in estimators:
            what = f"length estimator {spec.name}"
            with problems.of(what):
                estimator: LengthEstimator = loaded(spec.make, "make")(LIMITS)
                for history in (0, 1, 2000):
                    for _ in range(history):
                        estimator.observe(int(random.integers(1, 200)))
                    for used in (0.0, 0.5, 1.0):
                        _check_estimates(estimator, random, used)
            for scenario in SCENARIOS:
                with problems.of(f"{what}, random trace {scenario.seed}"):
                    simulate(scenario=scenario, estimator=load(spec.make))
    return len(estimators)


def _check_estimates(estimator: LengthEstimator, random: np.random.Generator, used: float) -> None:
    for rows in (0, 1, 100):
        max_new = random.integers(1, 1000, rows).astype(np.int32)
        produced = (random.random(rows) * max_new).astype(np.int32)
        ignore = random.random(rows) < 0.3
        totals = estimator.totals(produced.copy(), max_new.copy(), ignore, used)
        assert totals.shape == (rows,) and totals.dtype == np.int32, f"totals are not an int32 column of {rows}"
        assert (totals > produced).all(), "it foresees less than one more token"
        assert (totals <= max_new).all(), "it foresees more than max_new"
        if estimator.guaranteed:
            assert (totals == max_new).all(), "it calls itself guaranteed and foresees less than max_new"


def check_register_balancers(registry: Registry, plugin: str, samples: Sequence[Path] = ()) -> int:
    """Every choice is one of the places, equal chances give equal choices, and a fleet answers all its requests."""
    balancers = contributed(registry, plugin, specs.BalancerSpec)
    with all_problems() as problems:
        for spec in balancers:
            with problems.of(f"balancer {spec.name}"):
                make = loaded(spec.make, "make")
                assert _choices(make(Random(1))) == _choices(make(Random(1))), "it draws from another source of chance"
                simulate_fleet(make_trace("deaths", FLEET_LENGTHS, replicas=8, requests=200), make(Random(1)))
    return len(balancers)


def _choices(balancer: Balancer) -> list[int]:
    """What it chooses for random requests among 1 to 200 random places."""
    random, chosen = Random(0), list[int]()
    for count in (1, 2, 7, 65, 200):
        for _ in range(20):
            places = [_place(random, index) for index in range(count)]
            index = balancer.choose(Arrival(random.randrange(1, 10_000), random.getrandbits(64)), places)
            assert index in range(count), f"it chooses place {index} of {count}"
            chosen.append(index)
    return chosen


def _place(random: Random, index: int) -> Candidate:
    return Candidate(
        name=f"place-{index}",
        waiting=random.choice((0, random.randrange(50_000))),
        requests=random.choice((0, random.randrange(300))),
        kv_live=random.randrange(100_000),
        kv_total=random.choice((0, 100_000)),
        hit=random.choice((0, random.randrange(10_000))),
        speed=random.choice((0.5, 1.0, 2.0)),
        latency=random.choice((0.0, random.random())),
    )


def check_register_kv_managers(registry: Registry, plugin: str, samples: Sequence[Path] = ()) -> int:
    """Under random prompts a policy finds only what was kept, never drops what is in use, and loses no granule."""
    managers = contributed(registry, plugin, specs.KVManagerSpec)
    with all_problems() as problems:
        for spec in managers:
            what = f"prefix cache {spec.name}"
            for granule, seed in ((1, 0), (1, 1), (4, 2)):
                with problems.of(f"{what}, granule {granule}"):
                    _Run(loaded(spec.make, "make")(granule), granule, seed).steps(120)
            for scenario in SCENARIOS:
                with problems.of(f"{what}, random trace {scenario.seed}"):
                    simulate(scenario=scenario, manager=load(spec.make))
    return len(managers)


class _Run:
    """Requests that come and go over 64 granules, against a plain record of which granule holds what."""

    def __init__(self, manager: KVManager, granule: int, seed: int) -> None:
        self.manager, self.granule = manager, granule
        self.random = np.random.default_rng(seed)
        self.free = list(range(64))
        self.holds: dict[int, tuple[bytes, bytes]] = {}
        """Granule -> (salt, all content up to its end): what it may be matched for."""
        self.used: set[int] = set()

    def steps(self, count: int) -> None:
        """`count` requests, each matched, completed, kept, and now and then taken back or evicted."""
        for _ in range(count):
            salt = bytes([int(self.random.integers(0, 2))])
            content = self.random.integers(0, 3, int(self.random.integers(0, 24))).astype(np.int64)
            hit = self._match(salt, content)
            self.used = set(hit.tolist())
            granules = self._complete(content, hit)
            if granules is not None:
                self._insert(salt, content, granules)
            if self.random.random() < 0.2:
                self._remove(salt, content)
            self.used.clear()
            assert self.manager.stats()["granules"] == len(self.holds), "stats() miscounts granules"
        self._evict(64)
        assert not self.holds, f"{len(self.holds)} unused granules are kept when all are asked for"

    def _key(self, salt: bytes, content: Int64, index: int) -> tuple[bytes, bytes]:
        return salt, content[: (index + 1) * self.granule].tobytes()

    def _match(self, salt: bytes, content: Int64) -> Int32:
        hit = self.manager.match(salt, content)
        for index, granule in enumerate(hit.tolist()):
            wanted = self._key(salt, content, index)
            assert self.holds.get(granule) == wanted, f"granule {granule} is matched for what it lacks"
        return hit

    def _complete(self, content: Int64, hit: Int32) -> Int32 | None:
        need = len(content) // self.granule - len(hit)
        if need > len(self.free):
            self._evict(need - len(self.free))
        if need > len(self.free):
            return None
        return np.asarray([*hit.tolist(), *(self.free.pop() for _ in range(need))], np.int32)

    def _insert(self, salt: bytes, content: Int64, granules: Int32) -> None:
        kept = set(self.manager.insert(salt, content, granules).tolist())
        for index, granule in enumerate(granules.tolist()):
            if granule in kept:
                assert granule not in self.holds, f"granule {granule} is kept twice"
                self.holds[granule] = self._key(salt, content, index)
            elif granule not in self.holds:
                self.free.append(granule)
        assert kept <= set(granules.tolist()), "insert keeps granules it was not given"

    def _remove(self, salt: bytes, content: Int64) -> None:
        start = int(self.random.integers(0, len(content) + 1)) // self.granule * self.granule
        self._dropped(self.manager.remove(salt, content, start), "remove")
        left = len(self.manager.match(salt, content)) * self.granule
        assert left <= start, f"{left} tokens match after remove from token {start}"

    def _evict(self, n: int) -> None:
        used = self.used
        gone = self.manager.evict(n, lambda granules: np.asarray([int(g) in used for g in granules], np.bool_))
        assert not used & set(gone.tolist()), "evict drops granules that are in use"
        assert len(gone) <= n, f"evict drops {len(gone)} granules where {n} were asked for"
        self._dropped(gone, "evict")

    def _dropped(self, granules: Int32, what: str) -> None:
        for granule in granules.tolist():
            assert granule in self.holds, f"{what} drops granule {granule}, which is not kept"
            del self.holds[granule]
            if granule not in self.used:
                self.free.append(granule)


def check_register_schedulers(registry: Registry, plugin: str, samples: Sequence[Path] = ()) -> int:
    """Under every policy all requests of random traces end with the answers they have alone, and nothing leaks."""
    schedulers = contributed(registry, plugin, specs.SchedulerSpec)
    with all_problems() as problems:
        for spec, scenario in itertools.product(schedulers, SCENARIOS):
            with problems.of(f"scheduler {spec.name}, random trace {scenario.seed}"):
                make, watched = loaded(spec.make, "make"), list[_Watched]()
                simulate(lambda limits: _watch(make(limits), limits, watched), scenario)  # noqa: B023 - called at once
                wrong = dict.fromkeys(fault for policy in watched for fault in policy.faults)
                assert not wrong, f"core would overrule it: {'; '.join(wrong)}"
    return len(schedulers)


class _Watched:
    """A policy that keeps a list of what core would overrule, because core itself only logs that and goes on."""

    def __init__(self, policy: SchedulerPolicy, limits: SchedulerLimits) -> None:
        self.policy = policy
        self.limits = limits
        self.faults: list[str] = []

    def plan(self, view: SchedulerView) -> Decision:
        """The policy's own decision."""
        try:
            decision = self.policy.plan(view)
            wrong = fault(decision, cast("StepView", view), self.limits.max_running)
        except BaseException as error:
            self.faults.append(f"plan() raised {error!r}")
            raise
        if wrong is None and not np.size(decision.rows) and not decision.admit and view.running.size:
            wrong = "it plans nothing though requests could run"
        self.faults += [wrong] if wrong else []
        return decision


def _watch(policy: SchedulerPolicy, limits: SchedulerLimits, watched: list[_Watched]) -> SchedulerPolicy:
    watched.append(_Watched(policy, limits))
    return watched[-1]
