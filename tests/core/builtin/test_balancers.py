"""Built-in balancers: the choice of each, by the figures that it compares."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from llmcore.api import BalancerSpec
from llmcore.api.balancing import Arrival, Balancer, Candidate
from llmcore.builtin.balancers import FEW, KV_WEIGHT, Cost, PrefixOrLeastLoaded, register_balancers
from llmcore.registry.loader import load

SPECS: dict[str, BalancerSpec] = {spec.name: spec for spec in register_balancers()}
ARRIVAL = Arrival(tokens=1_000, key=7)


def made(name: str, seed: int = 0) -> Balancer:
    balancer: Balancer = load(SPECS[name].make)(Random(seed))
    return balancer


def places(count: int) -> list[Candidate]:
    return [Candidate(f"place-{index}") for index in range(count)]


def shares(name: str, candidates: list[Candidate], count: int = 4_000) -> list[float]:
    """The share of `count` requests that each place gets."""
    balancer = made(name)
    got = Counter(balancer.choose(replace(ARRIVAL, key=key), candidates) for key in range(count))
    return [got[index] / count for index in range(len(candidates))]


@pytest.mark.parametrize("name", SPECS)
def test_one_place_gets_everything(name: str) -> None:
    assert made(name).choose(ARRIVAL, places(1)) == 0


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ({"waiting": 500}, {"waiting": 501}),
        ({"hit": 640}, {}),
        ({"waiting": 600, "hit": 640}, {}),
        ({}, {"waiting": 700, "hit": 640}),
        ({"kv_live": 1_000}, {"kv_live": 2_000}),
        ({"hit": 640, "kv_live": 50_000}, {}),
        ({}, {"hit": 64, "kv_live": round(65 / KV_WEIGHT)}),
        ({"waiting": 900, "speed": 2.0}, {}),
    ],
)
def test_cost_takes_the_least_work(left: dict[str, Any], right: dict[str, Any]) -> None:
    better, worse = Candidate("a", **left), Candidate("b", **right)
    for key in range(20):
        assert made("cost").choose(Arrival(1_000, key), [better, worse]) == 0
        assert made("cost").choose(Arrival(1_000, key), [worse, better]) == 1


def test_cost_sends_what_begins_alike_to_the_same_of_equal_places() -> None:
    among = places(10)
    before = [among[made("cost").choose(Arrival(100, key), among)].name for key in range(1_000)]
    assert all(60 <= count <= 140 for count in Counter(before).values()) and len(set(before)) == 10
    shuffled = Random(1).sample(among, 10)
    assert before == [shuffled[made("cost", 5).choose(Arrival(100, key), shuffled)].name for key in range(1_000)]
    fewer = [place for place in among if place.name != "place-3"]
    after = [fewer[made("cost").choose(Arrival(100, key), fewer)].name for key in range(1_000)]
    assert {was for was, now in zip(before, after, strict=True) if was != now} == {"place-3"}


def test_cost_takes_keys_of_any_sign_and_of_64_bits() -> None:
    for key in (-(1 << 63), -1, 0, (1 << 64) - 1):
        assert made("cost").choose(Arrival(10, key), places(3)) in range(3)


def test_cost_compares_hits_and_a_few_others_among_many_places() -> None:
    among = places(FEW + 1)
    among[40] = replace(among[40], hit=640)
    assert {made("cost", seed).choose(ARRIVAL, among) for seed in range(50)} == {40}
    among[40] = replace(among[40], waiting=10_000)
    elsewhere = Counter(made("cost", seed).choose(ARRIVAL, among) for seed in range(300))
    assert 40 not in elsewhere and max(elsewhere.values()) < 30, "others are drawn at random"


def test_the_weight_of_kv_can_be_given() -> None:
    among = [Candidate("a", kv_live=1_000), Candidate("b", waiting=100)]
    assert Cost(Random(0), kv_weight=0.05).choose(ARRIVAL, among) == 0
    assert Cost(Random(0), kv_weight=0.2).choose(ARRIVAL, among) == 1


def test_hits_count_more_while_prompts_wait_everywhere() -> None:
    """A prompt of 100 tokens, half of it cached at the fuller place."""
    for idle, fuller, chosen in ((0, 40, 0), (0, 60, 1), (1_000, 4_000, 0), (1_000, 6_000, 1)):
        among = [Candidate("has it", waiting=fuller, hit=50), Candidate("has not", waiting=idle)]
        assert Cost(Random(0), scarce=8.0).choose(Arrival(100, 1), among) == chosen
    among = [Candidate("has it", waiting=4_000, hit=50), Candidate("has not", waiting=1_000)]
    assert Cost(Random(0), scarce=0.0).choose(Arrival(100, 1), among) == 1
    assert Cost(Random(0)).choose(Arrival(0, 1), [replace(place, hit=0) for place in among]) == 1, "an empty prompt"


def test_round_robin_takes_one_after_the_other() -> None:
    balancer = made("round_robin")
    chosen = [balancer.choose(ARRIVAL, places(5)) for _ in range(10)]
    assert chosen[:5] == chosen[5:] and sorted(chosen[:5]) == [0, 1, 2, 3, 4]
    assert len({made("round_robin", seed).choose(ARRIVAL, places(5)) for seed in range(50)}) == 5


def test_least_requests_draws_among_equals() -> None:
    among = [Candidate("a", requests=2), Candidate("b", requests=1), Candidate("c", requests=1)]
    a, b, c = shares("least_requests", among)
    assert a == 0 and abs(b - c) < 0.05


@pytest.mark.parametrize(
    ("counts", "hits", "wanted"),
    [
        ((10, 0, 0), (640, 0, 0), {0}),
        ((10, 0, 0), (300, 0, 0), {1, 2}),
        ((64, 0, 9), (640, 0, 0), {0}),
        ((65, 0, 9), (640, 0, 0), {1}),
        ((300, 210, 220), (640, 0, 0), {0}),
        ((10, 0, 0), (320, 640, 0), {1}),
    ],
)
def test_prefix_unless_short_or_uneven(counts: tuple[int, ...], hits: tuple[int, ...], wanted: set[int]) -> None:
    pairs = zip(counts, hits, strict=True)
    among = [Candidate(f"p{index}", requests=count, hit=hit) for index, (count, hit) in enumerate(pairs)]
    assert {PrefixOrLeastLoaded(Random(seed)).choose(ARRIVAL, among) for seed in range(30)} == wanted


def test_random_follows_speed() -> None:
    fast, slow = shares("random", [Candidate("a", speed=3.0), Candidate("b", speed=1.0)])
    assert abs(fast - 0.75) < 0.03 and abs(slow - 0.25) < 0.03


@pytest.mark.parametrize(
    ("name", "figures"),
    [
        ("min_expected_latency", [{"requests": 4, "speed": 4.0}, {"requests": 4, "speed": 2.0}, {"requests": 4}]),
        ("min_observed_latency", [{"latency": 0.0}, {"latency": 1.0}, {"latency": 2.0}]),
    ],
)
def test_the_better_of_two(name: str, figures: list[dict[str, Any]]) -> None:
    best, middle, worst = shares(name, [Candidate(f"p{i}", **row) for i, row in enumerate(figures)])
    assert abs(best - 2 / 3) < 0.03 and abs(middle - 1 / 3) < 0.03 and worst == 0, "the best does not get everything"
