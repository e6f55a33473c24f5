"""Length estimators: bounds, the cap, and a distribution that is learnt."""

from __future__ import annotations

import numpy as np
import pytest
from llmcore.api.sched import SchedulerLimits
from llmcore.builtin.estimators import ENOUGH, HISTORY, Capped, Conservative, PastFuture

LIMITS = SchedulerLimits(
    max_running=8, max_input_len=100, max_total_len=4000, batch_tokens=64, chunk_tokens=64, capped_new_tokens=100
)
RATIO = SchedulerLimits(
    max_running=8, max_input_len=100, max_total_len=4000, batch_tokens=64, chunk_tokens=64, token_ratio=0.5
)


def column(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def never(n: int) -> np.ndarray:
    return np.zeros(n, np.bool_)


def test_conservative_is_the_literal_limit_and_a_guarantee() -> None:
    assert Conservative(LIMITS).totals(column(0, 5), column(10, 20), never(2), 0.0).tolist() == [10, 20]
    assert Conservative(LIMITS).guaranteed


def test_capped_grows_with_what_was_produced() -> None:
    totals = Capped(LIMITS).totals(column(0, 0, 200, 998), column(50, 1000, 1000, 1000), never(4), 0.9)
    assert totals.tolist() == [50, 100, 220, 1000]
    ignoring = Capped(LIMITS).totals(column(0), column(1000), np.ones(1, np.bool_), 0.0)
    assert ignoring.tolist() == [1000], "an answer that ignores eos is as long as it may be"


def test_above_the_ratio_capped_is_literal() -> None:
    capped = Capped(RATIO)
    assert capped.totals(column(0), column(3000), never(1), 0.49).tolist() == [1024]
    assert capped.totals(column(0), column(3000), never(1), 0.5).tolist() == [3000]


def test_without_history_the_past_is_capped() -> None:
    estimator = PastFuture(LIMITS)
    for _ in range(ENOUGH - 1):
        estimator.observe(7)
    assert estimator.totals(column(0), column(1000), never(1), 0.0).tolist() == [100]
    estimator.observe(7)
    assert estimator.totals(column(0), column(1000), never(1), 0.0).tolist() == [7]


@pytest.mark.parametrize("produced", [0, 30, 80])
def test_draws_follow_the_recent_answers_that_were_longer(produced: int) -> None:
    estimator = PastFuture(LIMITS)
    for length in range(1, 101):
        estimator.observe(length)
    totals = estimator.totals(np.full(4000, produced, np.int32), np.full(4000, 1000, np.int32), never(4000), 0.0)
    assert totals.min() == produced + 1
    assert totals.max() == 100
    assert abs(totals.mean() - (produced + 1 + 100) / 2) < 2


def test_an_answer_longer_than_all_recent_ones_is_capped_and_limits_hold() -> None:
    estimator = PastFuture(LIMITS)
    for _ in range(50):
        estimator.observe(40)
    totals = estimator.totals(column(39, 40, 500, 0), column(1000, 1000, 1000, 20), never(4), 0.0)
    assert totals.tolist() == [40, 100, 550, 20]


def test_old_answers_are_forgotten_and_equal_histories_draw_alike() -> None:
    first, second = PastFuture(LIMITS), PastFuture(LIMITS)
    arguments = (np.zeros(20, np.int32), np.full(20, 100, np.int32), never(20), 0.0)
    for estimator in (first, second):
        for length in [10] * 50 + [20] * HISTORY:
            estimator.observe(length)
        assert set(estimator.totals(*arguments).tolist()) == {20}
        for length in range(1, 60):
            estimator.observe(length)
    assert len(set(first.totals(*arguments).tolist())) > 1
    second.totals(*arguments)
    assert (first.totals(*arguments) == second.totals(*arguments)).all()
