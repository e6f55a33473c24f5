"""The scheduler in the simulator, which checks every step, over traces of every kind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from llmcore.api.sched import Decision, SchedulerLimits, SchedulerView
from llmcore.builtin.estimators import Capped, Conservative, PastFuture
from llmcore.builtin.fcfs import FCFS
from llmcore.builtin.radix import NoCache, RadixCache
from llmcore_devtools.simulator import Scenario, simulate

from tests.examples import examples


@st.composite
def scenarios(draw: st.DrawFn, **fixed: Any) -> Scenario:
    """Engines from roomy to so small that only one request fits."""
    granules = draw(st.sampled_from([(1,), (2,), (16,), (1, 2), (4, 16)]))
    prompt, answer = draw(st.sampled_from([5, 20, 40])), draw(st.sampled_from([1, 8, 24]))
    chunked = draw(st.booleans())
    batch = draw(st.sampled_from([40, 64])) if not chunked else draw(st.sampled_from([24, 64]))
    chosen: dict[str, Any] = {
        "seed": draw(st.integers(0, 10_000)),
        "requests": 10,
        "granules": granules,
        "slots": -(-(prompt + answer) // 16) * 16 * draw(st.sampled_from([3, 4, 8])),
        "max_running": draw(st.sampled_from([3, 8])),
        "batch_tokens": batch,
        "chunk_tokens": draw(st.sampled_from([16, 24])),
        "stall_tokens": draw(st.sampled_from([0, 0, 3, 12])),
        "chunked": chunked,
        "wait_steps": draw(st.sampled_from([0, 0, 3])),
        "ahead": draw(st.sampled_from([0, 1])),
        "longest_prompt": prompt,
        "longest_answer": answer,
        "vocab": draw(st.sampled_from([3, 50])),
    }
    return Scenario(**{**chosen, **fixed})


ESTIMATORS: dict[str, Callable[[SchedulerLimits], Any]] = {
    "past_future": PastFuture,
    "capped": Capped,
    "conservative": Conservative,
}


@pytest.mark.parametrize("estimator", ESTIMATORS)
@examples(15)
@given(scenario=scenarios())
def test_every_request_is_answered_as_if_alone(estimator: str, scenario: Scenario) -> None:
    simulate(FCFS, scenario, estimator=ESTIMATORS[estimator])


@examples(18)
@given(scenario=scenarios(most_choices=1), factor=st.sampled_from([1, 2]))
def test_with_the_least_memory_everything_still_ends(scenario: Scenario, factor: int) -> None:
    size = scenario.longest_prompt + scenario.longest_answer
    tight = {**scenario.__dict__, "slots": -(-size // 16) * 16 * factor}
    simulate(FCFS, Scenario(**tight), estimator=Capped)


@examples(18)
@given(scenario=scenarios(aborts=0.03, finishes=0.05))
def test_clients_that_leave_take_nothing_with_them(scenario: Scenario) -> None:
    simulate(FCFS, scenario)


@examples(25)
@given(scenario=scenarios(cursed=0.1, poisoned=0.2, aborts=0.01))
def test_a_failure_ends_only_its_own_request(scenario: Scenario) -> None:
    simulate(FCFS, scenario)


@examples(15)
@given(scenario=scenarios())
def test_without_a_cache(scenario: Scenario) -> None:
    assert simulate(FCFS, scenario, manager=NoCache).totals.cached_tokens == 0


OTHERS: list[dict[str, float]] = [
    {},
    {"cursed": 0.1, "poisoned": 0.1},
    {"aborts": 0.03, "finishes": 0.03},
    {"searches": 0.5},
]


@examples(30)
@given(
    scenario=scenarios(requests=6),
    ahead=st.sampled_from([0, 1, 2]),
    failures=st.sampled_from([0.03, 0.3]),
    others=st.sampled_from(OTHERS),
)
def test_steps_that_fail_at_any_time_end_nobody_who_does_not_fail_again(
    scenario: Scenario, ahead: int, failures: float, others: dict[str, float]
) -> None:
    changed = {"ahead": ahead, "failures": failures, **others}
    if others.get("searches"):
        changed |= {"vocab": 50, "longest_answer": min(8, scenario.longest_answer)}
    simulate(FCFS, Scenario(**{**scenario.__dict__, **changed}), estimator=Capped)


@examples(15)
@given(scenario=scenarios(vocab=50, requests=5), crowd=st.sampled_from([1, 2]))
def test_where_only_small_steps_succeed_everyone_is_answered(scenario: Scenario, crowd: int) -> None:
    """As where memory runs out in every step of more rows than that."""
    report = simulate(FCFS, Scenario(**{**scenario.__dict__, "crowd": crowd}))
    assert report.totals.failed_requests == 0


def test_it_finds_a_scheduler_that_ends_those_who_failed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llmcore.sched.isolation.TRIALS", 0)
    with pytest.raises(AssertionError, match="another's error"):
        simulate(FCFS, Scenario(seed=3, failures=0.1))


def test_it_finds_a_cache_that_keeps_what_a_failed_step_put_there() -> None:
    class Forgetful(RadixCache):
        def remove(self, salt: bytes, content: Any, start: int) -> Any:
            return super().remove(salt, content, len(content))

    def run() -> None:
        for seed in range(20):
            simulate(FCFS, Scenario(seed=seed, failures=0.2, chunk_tokens=8, ahead=1), manager=Forgetful)

    with pytest.raises(AssertionError):
        run()


def test_the_same_scenario_runs_the_same_way() -> None:
    first, second = (simulate(FCFS, Scenario(seed=5, requests=30), estimator=PastFuture) for _ in range(2))
    assert first == second


def test_what_a_twin_put_into_the_cache_can_be_evicted_after_a_failure() -> None:
    scenario = Scenario(
        seed=703569, requests=30, granules=(1, 2), slots=128, batch_tokens=64, chunk_tokens=64, poisoned=0.4
    )
    simulate(FCFS, scenario, estimator=ESTIMATORS["conservative"])
    simulate(FCFS, scenario, estimator=Capped)


def test_the_last_choice_to_write_a_shared_granule_needs_no_copy() -> None:
    scenario = Scenario(
        seed=4973,
        requests=5,
        granules=(4, 16),
        slots=48,
        max_running=3,
        batch_tokens=64,
        longest_prompt=5,
        longest_answer=8,
        arrivals=0.1,
    )
    assert simulate(FCFS, scenario, estimator=Conservative).totals.preemptions == 0


def test_shared_prefixes_are_found() -> None:
    totals = simulate(FCFS, Scenario(seed=1, requests=40)).totals
    assert totals.cached_tokens > totals.prompt_tokens // 10


def test_it_finds_a_policy_that_starves() -> None:
    class Nobody:
        def __init__(self, limits: SchedulerLimits) -> None:
            pass

        def plan(self, view: SchedulerView) -> Decision:
            return Decision(view.running[:0], view.running[:0])

    simulate(Nobody, Scenario(requests=5))


def test_it_finds_a_cache_that_mixes_up_contents() -> None:
    class Confused(RadixCache):
        def match(self, salt: bytes, content: Any) -> Any:
            return super().match(salt, content * 0)

        def insert(self, salt: bytes, content: Any, granules: Any) -> Any:
            return super().insert(salt, content * 0, granules)

    with pytest.raises(AssertionError, match="reads KV that is not its own"):
        simulate(FCFS, Scenario(requests=10), manager=Confused)


def test_it_finds_a_cache_that_keeps_what_it_should_drop() -> None:
    class Hoarder(RadixCache):
        def evict(self, n: int, in_use: Any) -> Any:
            return super().evict(0, in_use)

    with pytest.raises((AssertionError, ValueError)):
        simulate(FCFS, Scenario(requests=10, slots=128), manager=Hoarder)


@examples(18)
@given(scenario=scenarios(searches=0.5, vocab=50, longest_answer=8, requests=6))
def test_searches_find_what_they_would_have_found_alone(scenario: Scenario) -> None:
    simulate(FCFS, scenario)


@examples(18)
@given(scenario=scenarios(searches=1.0, vocab=50, longest_answer=8, requests=6, cursed=0.1, poisoned=0.2, aborts=0.02))
def test_searches_fail_and_leave_alone(scenario: Scenario) -> None:
    simulate(FCFS, scenario, estimator=Capped)


@examples(15)
@given(
    scenario=scenarios(searches=0.7, vocab=50, longest_answer=8, requests=6, failures=0.05),
    factor=st.sampled_from([3, 4]),
)
def test_searches_with_the_least_memory_everything_still_ends(scenario: Scenario, factor: int) -> None:
    size = scenario.longest_prompt + scenario.longest_answer
    tight = {**scenario.__dict__, "slots": -(-size // 16) * 16 * factor}
    simulate(FCFS, Scenario(**tight), estimator=Capped)


def test_searches_that_are_preempted_start_again() -> None:
    scenarios = [
        Scenario(seed=seed, requests=12, granules=(1, 4), slots=96, longest_prompt=8, searches=1.0, ahead=1)
        for seed in (1, 4, 10)
    ]
    tight = [Scenario(**{**scenario.__dict__, "arrivals": 0.9}) for scenario in scenarios]
    assert sum(simulate(FCFS, scenario, estimator=Capped).totals.preemptions for scenario in tight)


DRAFTED: list[dict[str, float]] = [
    {},
    {"aborts": 0.03, "finishes": 0.03},
    {"cursed": 0.1, "poisoned": 0.1},
    {"failures": 0.1},
    {"searches": 0.4},
]


@pytest.mark.parametrize("estimator", ESTIMATORS)
@examples(30)
@given(
    scenario=scenarios(requests=8, longest_answer=24, vocab=50),
    drafts=st.sampled_from([1, 2, 4]),
    ahead=st.sampled_from([0, 1, 2]),
    room=st.sampled_from([3, 4, 8]),
    others=st.sampled_from(DRAFTED),
)
def test_whatever_a_drafter_proposes_answers_and_capacity_stay_the_same(
    estimator: str, scenario: Scenario, drafts: int, ahead: int, room: int, others: dict[str, float]
) -> None:
    """Of up to four drafted tokens any number is right, beside aborts, forks, preemptions and prefix hits."""
    size = -(-(scenario.longest_prompt + scenario.longest_answer) // 16) * 16
    changed: dict[str, Any] = {"drafts": drafts, "ahead": ahead, "slots": room * size, **others}
    simulate(FCFS, Scenario(**{**scenario.__dict__, **changed}), estimator=ESTIMATORS[estimator])


def test_right_drafts_save_steps_and_are_preempted_like_others() -> None:
    def run(**more: Any) -> Any:
        return simulate(FCFS, Scenario(seed=9, requests=30, ahead=1, longest_answer=40, **more), estimator=Capped)

    assert run(drafts=4).steps < 0.75 * run().steps
    assert run(drafts=4, slots=128, arrivals=0.95).totals.preemptions > 0


LOADED: list[dict[str, float]] = [
    {},
    {"aborts": 0.05, "finishes": 0.03},
    {"cursed": 0.1, "poisoned": 0.1, "failures": 0.05},
    {"drafts": 4},
    {"searches": 0.4},
    {"continued": 0.7},
]


@examples(60)
@given(
    scenario=scenarios(requests=8, vocab=50),
    estimator=st.sampled_from(sorted(ESTIMATORS)),
    room=st.sampled_from([3, 4, 8]),
    others=st.sampled_from(LOADED),
)
def test_kv_that_others_write_is_held_under_leases(
    scenario: Scenario, estimator: str, room: int, others: dict[str, float]
) -> None:
    """Sources write in time, late or never, beside aborts, failures, forks and preemptions."""
    size = -(-(scenario.longest_prompt + scenario.longest_answer) // 16) * 16
    changed: dict[str, Any] = {"loads": 0.6, "slots": room * size, **others}
    simulate(FCFS, Scenario(**{**scenario.__dict__, **changed}), estimator=ESTIMATORS[estimator])


CONTINUED: list[dict[str, float]] = [
    {},
    {"aborts": 0.03, "finishes": 0.05},
    {"cursed": 0.1, "poisoned": 0.1, "failures": 0.05},
    {"drafts": 4},
]


@examples(30)
@given(
    scenario=scenarios(requests=8, continued=0.7),
    estimator=st.sampled_from(sorted(ESTIMATORS)),
    room=st.sampled_from([1, 3, 8]),
    others=st.sampled_from(CONTINUED),
)
def test_answers_that_began_elsewhere_go_on(
    scenario: Scenario, estimator: str, room: int, others: dict[str, float]
) -> None:
    """Beside others that share their prompts, in little memory and with failures."""
    size = -(-(scenario.longest_prompt + scenario.longest_answer) // 16) * 16
    changed: dict[str, Any] = {"most_choices": 2 if room > 1 else 1, "slots": room * size, **others}
    simulate(FCFS, Scenario(**{**scenario.__dict__, **changed}), estimator=ESTIMATORS[estimator])


def test_most_leases_are_filled_and_the_rest_is_computed() -> None:
    report = simulate(FCFS, Scenario(seed=4, requests=40, loads=1.0, slots=1024))
    assert 5 < report.filled < 30


def test_leases_go_before_running_requests_are_preempted() -> None:
    scenario = Scenario(seed=3, requests=40, loads=0.7, slots=64, most_choices=1, arrivals=0.95)
    assert simulate(FCFS, scenario, estimator=Capped).filled > 0
