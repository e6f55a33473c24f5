"""Predictions of what fits: arithmetic against numbers worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from llmcore.api.models import KVGroupSpec, ModelConfig
from llmcore.api.specs import DeviceInfo
from llmcore.config import make_config
from llmcore.engine.memory import GRAPH_BYTES, Machine, predict, total_len
from llmcore.weights.load import Weighed

GIB = 1 << 30
MODEL = ModelConfig(
    architecture="TestForCausalLM",
    vocab_size=1000,
    hidden_size=100,
    num_layers=2,
    max_position=32768,
    dtype="bf16",
    kv_groups=(KVGroupSpec(name="all", layers=(0, 1), kv_heads=2, key_size=8, value_size=8),),
)
WEIGHTS = Weighed(parameters=140_100, bytes=280_200, tensors=3, rows=frozenset({1000, 400}))
KV_TOKEN = 2 * 2 * (8 + 8) * 2
ACCELERATOR = Machine(info=DeviceInfo("x", "x1"), memory=GIB, step_tokens=8192, kv=None)
CPU = Machine(info=DeviceInfo("cpu"), memory=64 * GIB, step_tokens=2048, kv=4 * GIB)


def test_an_accelerator_gives_kv_what_the_rest_leaves_and_requests_can_hold() -> None:
    config = make_config(mem_fraction=0.5, batch_max_tokens=10, running_max_req_size=4, max_req_total_len=100)
    budget = predict(MODEL, WEIGHTS, config, ACCELERATOR, KV_TOKEN)
    assert budget.parameters == 140_100
    assert budget.weights == 280_200
    assert budget.tables == 4 * 100 * 4
    assert budget.activations == 10 * (6 * 100 + 3 * 400) * 2 + 4 * 1000 * 4 * 2
    assert budget.kv_tokens == 400 and budget.pool == 400 * 128
    assert budget.longest == 100 and budget.fits
    more = make_config(mem_fraction=0.5, batch_max_tokens=10, running_max_req_size=400)
    budget = predict(MODEL, WEIGHTS, more, ACCELERATOR, KV_TOKEN)
    assert budget.pool == GIB // 2 - 280_200 - budget.activations - 400 * 16384 * 4 - GRAPH_BYTES
    assert budget.kv_tokens == budget.pool // 128


def test_a_share_of_what_the_weights_leave() -> None:
    config = make_config(cache_max_entry_count=0.25, batch_max_tokens=10, running_max_req_size=400)
    budget = predict(MODEL, WEIGHTS, config, ACCELERATOR, KV_TOKEN)
    assert budget.pool == int((GIB - 280_200) * 0.25)
    assert budget.limit == "25% of what the weights leave"
    whole = predict(MODEL, WEIGHTS, make_config(cache_max_entry_count=1), ACCELERATOR, KV_TOKEN)
    assert whole.pool == predict(MODEL, WEIGHTS, make_config(mem_fraction=1), ACCELERATOR, KV_TOKEN).pool


def test_experts_that_give_more_than_the_widest_projection() -> None:
    config = make_config(batch_max_tokens=10, running_max_req_size=4)
    for elements, counted in ((1300, 1300), (1100, 3 * 400)):
        budget = predict(replace(MODEL, expert_elements=elements), WEIGHTS, config, ACCELERATOR, KV_TOKEN)
        assert budget.activations == 10 * (6 * 100 + counted) * 2 + 4 * 1000 * 4 * 2


def test_a_cpu_grants_a_pool_of_its_own() -> None:
    budget = predict(MODEL, WEIGHTS, make_config(running_max_req_size=10_000), CPU, KV_TOKEN)
    assert (budget.pool, budget.kv_tokens, budget.graphs) == (4 * GIB, 4 * GIB // 128, 0)


def test_max_total_token_num_is_taken_literally() -> None:
    budget = predict(MODEL, WEIGHTS, make_config(max_total_token_num=5000, max_req_total_len=4000), CPU, KV_TOKEN)
    assert (budget.kv_tokens, budget.pool, budget.longest) == (5000, 5000 * 128, 4000)


def test_what_does_not_fit_says_so() -> None:
    small = Machine(info=DeviceInfo("x"), memory=GRAPH_BYTES, step_tokens=8192, kv=None)
    budget = predict(MODEL, WEIGHTS, make_config(), small, KV_TOKEN)
    assert budget.kv_tokens == 0 and not budget.fits


@pytest.mark.parametrize(("given", "length"), [(None, 16384), (100, 100), (20000, 20000)])
def test_the_longest_request(given: int | None, length: int) -> None:
    assert total_len(make_config(max_req_total_len=given), MODEL) == length
