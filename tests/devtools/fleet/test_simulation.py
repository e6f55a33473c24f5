"""The simulated fleet, and what built-in balancers do in it: 40 replicas and 2,000 requests of every trace."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from random import Random

import pytest
from llmcore.api.balancing import Arrival, Candidate
from llmcore.builtin.balancers import register_balancers
from llmcore.registry.loader import load
from llmcore_devtools.fleet import HERD, TRACES, Call, Fleet, Machine, Outcome, Trace, make_trace, simulate

ROOT = Path(__file__).resolve().parents[3]
MAKERS = {spec.name: load(spec.make) for spec in register_balancers()}
REPLICAS, REQUESTS = 40, 2_000


class First:
    """Chooses the first candidate."""

    def choose(self, arrival: Arrival, candidates: Sequence[Candidate]) -> int:
        return 0


@cache
def trace(name: str) -> Trace:
    with (ROOT / "benchmarks" / "lengths" / "sharegpt_qwen3.csv").open(newline="") as file:
        lengths = [(int(prompt), int(answer)) for prompt, answer in list(csv.reader(file))[1:]]
    return make_trace(name, lengths, REPLICAS, REQUESTS)


@cache
def outcome(name: str, balancer: str) -> Outcome:
    return simulate(trace(name), MAKERS[balancer](Random(0)))


@pytest.mark.parametrize("name", TRACES)
def test_no_balancer_gives_a_sooner_first_token_than_the_default(name: str) -> None:
    late = {balancer: outcome(name, balancer).quantile(0.99) for balancer in MAKERS}
    assert late["cost"] <= 1.05 * min(late.values()), late


@pytest.mark.parametrize("name", TRACES)
def test_the_default_sends_no_herd(name: str) -> None:
    assert outcome(name, "cost").herd <= HERD


def test_a_balancer_that_trusts_old_figures_sends_a_herd() -> None:
    calls = [Call(0.01 * number, 1_000, 10, 0, 0, number + 1) for number in range(200)]
    got = simulate(Trace("few", calls, Fleet([Machine()] * 4)), First())
    assert got.herd == pytest.approx(24 * 1_000 / 2_000), "25 calls of a quarter second without the longest"
    assert got.busiest == 4


def test_one_long_prompt_is_no_herd_and_neither_is_a_full_fleet() -> None:
    long = [Call(0.01, 16_000, 10, 0, 0, 1)]
    assert simulate(Trace("long", long, Fleet([Machine()] * 2)), First()).herd == 0
    calls = [Call(0.01 * number, 4_000, 10, 0, 0, number + 1) for number in range(50)]
    assert simulate(Trace("full", calls, Fleet([Machine()])), First()).herd == 0, "no replica is idle"


@pytest.mark.parametrize("balancer", MAKERS)
def test_nothing_goes_to_a_replica_that_has_been_dead_for_a_second(balancer: str) -> None:
    got = outcome("deaths", balancer)
    assert got.late == 0 and len(got.first_tokens) == 0.8 * REQUESTS, "and all requests are answered"


def test_requests_of_a_dead_replica_are_answered_by_another() -> None:
    calls = [Call(0.1, 100, 100, 0, 0, 1), Call(0.2, 100, 100, 0, 0, 2)]
    fleet = Fleet([Machine(), Machine()], {0: (0.11, 100.0), 1: (200.0, 300.0)})
    got = simulate(Trace("one dies", calls, fleet), First())
    assert got.to_dead == 1 and got.late == 0
    assert all(0.55 < seconds < 1.0 for seconds in got.first_tokens), got.first_tokens


@pytest.mark.parametrize("name", TRACES)
def test_senders_that_tell_each_other_do_about_as_well_as_one(name: str) -> None:
    one, four = outcome(name, "cost"), simulate(trace(name), *(MAKERS["cost"](Random(seed)) for seed in range(4)))
    assert four.quantile(0.99) <= 1.2 * one.quantile(0.99) and four.hit >= one.hit - 0.1 and four.herd <= HERD


@pytest.mark.parametrize("name", ["zipf", "sessions", "memory"])
def test_senders_that_know_only_their_own_calls_find_fewer_prefixes(name: str) -> None:
    silent = simulate(trace(name), *(MAKERS["cost"](Random(seed)) for seed in range(4)), telling=False)
    assert silent.hit < outcome(name, "cost").hit - 0.1
    assert silent.quantile(0.99) > 1.5 * outcome(name, "cost").quantile(0.99)


def test_a_sender_hears_of_the_calls_of_others_at_once() -> None:
    """Two long prompts, of two senders, between two reports."""
    calls = [Call(0.01 * number, 4_000, 10, 0, 0, number + 1) for number in (1, 2)]
    both = Trace("two", calls, Fleet([Machine()] * 2))
    balancers = [MAKERS["cost"](Random(0)) for _ in calls]
    assert simulate(both, *balancers).busiest == 1
    same = Trace("alike", [Call(call.time, 4_000, 10, 0, 4_000 // 64, call.own) for call in calls], both.fleet)
    assert simulate(same, *balancers, telling=False).busiest == 2, "they prefer the same replica"


def test_a_call_waits_for_the_answer_before_it() -> None:
    calls = [Call(0.1, 100, 50, 0, 0, 1), Call(2.0, 200, 50, 0, 0, 1, after=0), Call(0.0, 300, 50, 0, 0, 1, after=1)]
    alone = simulate(Trace("three", calls, Fleet([Machine()])), First())
    apart = [Call(10.0 * number, call.prompt, call.answer, 0, 0, 1) for number, call in enumerate(calls)]
    assert alone.first_tokens == pytest.approx(
        simulate(Trace("apart", apart, Fleet([Machine()])), First()).first_tokens
    ), "they find nobody before them, and their time counts from their own arrival"


def test_the_same_trace_gives_the_same_outcome() -> None:
    assert outcome("deaths", "cost") == simulate(trace("deaths"), MAKERS["cost"](Random(0)))
