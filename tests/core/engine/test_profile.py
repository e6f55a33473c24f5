"""What is taken before the first step: workspaces for the largest one of every bucket, and that step itself."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from llmcore.api.errors import PluginError
from llmcore.api.protocols import AttnLimits, SchedulerLimits
from llmcore.api.specs import TOKEN_BUCKETS, bucket_of
from llmcore.engine import profile
from llmcore.engine.profile import prompts_plan, take_workspaces, tokens_within, warm_plans, worst_plan
from llmcore.layers import AttentionKernels

LIMITS = SchedulerLimits(
    max_running=100,
    max_input_len=999,
    max_total_len=1000,
    batch_tokens=2048,
    chunk_tokens=2048,
    wait_steps=0,
    token_ratio=None,
    capped_new_tokens=16,
    chunked=True,
)


class Kernel:
    """Notes what it is told."""

    def __init__(self) -> None:
        self.told: list[AttnLimits] = []

    def workspace(self, limits: AttnLimits) -> None:
        self.told.append(limits)


def kernels() -> AttentionKernels:
    return AttentionKernels(*(tuple(Kernel() for _ in TOKEN_BUCKETS) for _ in range(3)))  # type: ignore[arg-type]


def test_every_kernel_takes_its_workspace_once() -> None:
    groups = {"a": kernels(), "b": kernels()}
    take_workspaces(groups, LIMITS)
    for group in groups.values():
        # decode steps are padded to the next size, mixed ones to a row for every token
        for side, rows in zip(
            group, ((1, 16, 64, 112, 112), (1, 16, 64, 100, 100), (1, 16, 64, 256, 512)), strict=True
        ):
            told = [kernel.told for kernel in side]  # type: ignore[attr-defined]
            assert [[(most.tokens, most.rows, most.kv_len) for most in seen] for seen in told] == [
                [(tokens, count, 1000)] for tokens, count in zip((1, 16, 64, 256, 2048), rows, strict=True)
            ]


def test_a_kernel_that_cannot_is_named() -> None:
    group = kernels()
    group.prefill[2].workspace = lambda most: 1 / 0  # type: ignore[method-assign,assignment,return-value]
    with pytest.raises(PluginError, match=r"Kernel of KV group 'kv' cannot .* division by zero; pin another"):
        take_workspaces({"kv": group}, LIMITS)


def test_the_worst_step_uses_the_budget_and_every_place() -> None:
    plan = worst_plan(LIMITS, (1, 4))
    assert plan.n_tokens == 2048 and plan.request.size == 100
    assert int(plan.n_query.max()) <= LIMITS.max_input_len
    assert [write.index.size for write in plan.writes] == [2048, int(np.ceil(plan.n_query / 4).sum())]


def test_warming_up_meets_every_bucket_in_every_kind_of_step() -> None:
    plans = warm_plans(LIMITS)
    kinds = {
        (bucket_of(plan.n_tokens), plan.n_decode == plan.request.size, plan.n_decode == 0, int(plan.start[0]))
        for plan in plans
    }
    for bucket in range(len(TOKEN_BUCKETS) - 1):
        assert {(bucket, True, False, 0), (bucket, True, False, 999), (bucket, False, True, 0)} <= kinds
    # latent attention is computed in another way where much is cached
    assert {(bucket, start) for bucket, _, prefills, start in kinds if prefills and start} == {
        *((bucket, TOKEN_BUCKETS[bucket][1]) for bucket in range(len(TOKEN_BUCKETS) - 1)),
        (4, LIMITS.max_input_len // 2),
    }
    assert {bucket for bucket, decodes, prefills, _ in kinds if not decodes and not prefills} == {1, 2, 3, 4}
    # as few rows as a bucket has are worked on in other ways than as many
    decoding = {plan.n_decode for plan in plans if plan.n_decode == plan.request.size}
    assert {first for first, _ in TOKEN_BUCKETS if first <= LIMITS.max_running} <= decoding
    drawn = [admitted.sampling for plan in plans for admitted in plan.admitted]
    assert {(way.temperature > 0, way.top_p < 1, bool(way.logit_bias), bool(way.allowed_ids)) for way in drawn} >= {
        (False, False, False, False),
        (True, False, False, False),
        (True, True, False, False),
        (True, False, False, True),
        (True, False, True, True),
    }
    assert all(plan.n_tokens <= LIMITS.batch_tokens and plan.request.size <= LIMITS.max_running for plan in plans)
    assert all((plan.start + plan.n_query <= LIMITS.max_total_len).all() for plan in plans)


def test_warming_up_within_the_smallest_limits() -> None:
    small = replace(LIMITS, max_running=1, max_input_len=1, max_total_len=2, batch_tokens=2, chunk_tokens=2)
    assert {plan.n_tokens for plan in warm_plans(small)} == {1}


@pytest.mark.parametrize(
    ("changed", "taken"),
    [
        ({}, [999, 999]),
        ({"batch_tokens": 1500}, [999]),
        ({"max_input_len": 10_000, "batch_tokens": 8192}, [2048]),
        ({"max_input_len": 10_000, "batch_tokens": 300}, [300]),
        ({"max_input_len": 10}, [10] * 100),
        ({"max_input_len": 1, "max_running": 1}, [1]),
    ],
)
def test_how_fast_prompts_are_is_measured_within_the_limits(changed: dict[str, int], taken: list[int]) -> None:
    plan = prompts_plan(replace(LIMITS, **changed))
    assert plan.n_query.tolist() == taken and plan.n_decode == 0


def test_prompts_have_the_time_of_a_step_without_them_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """2,048 tokens in 220 ms, and 18 ms for the weights: 38 ms of prompts make a step 20 ms longer."""
    monkeypatch.setattr(profile, "_fastest", lambda runner, device, plan, times: 18.0 if plan.n_decode else 220.0)
    unused: Any = None
    tokens, line = tokens_within(20.0, unused, unused, LIMITS)
    assert tokens == int(38 * prompts_plan(LIMITS).n_tokens / 220)
    assert line.startswith(
        f"{tokens:,} tokens of a step beside answers (20 ms more than the 18.0 ms of a step without"
    )
    monkeypatch.setattr(profile, "_fastest", lambda runner, device, plan, times: 1e-6 if plan.n_decode else 220.0)
    assert tokens_within(1e-6, unused, unused, LIMITS)[0] == 1, "at least one"
