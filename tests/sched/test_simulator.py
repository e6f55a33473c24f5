"""The scheduler in a simulator that checks every step, over many kinds of trace."""

from __future__ import annotations

import pytest
from llmcore.builtin.estimators import Capped, Conservative, PastFuture
from llmcore.builtin.fcfs import FCFS
from llmcore.builtin.radix import NoCache, RadixCache
from llmcore.testing.simulator import Scenario, simulate

ESTIMATORS = {"past_future": PastFuture, "capped": Capped, "conservative": Conservative}


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_basic(estimator: str, ahead: int) -> None:
    for seed in range(20):
        simulate(FCFS, Scenario(seed=seed, ahead=ahead), estimator=ESTIMATORS[estimator], manager=RadixCache)
