"""Prompts beside answers: as many tokens of them as `stall_tokens` while an answer waits, more when many wait."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from llmcore.sched.capacity import TILE, beside_answers
from llmcore.sched.plan import StepPlan

MakeBench = Callable[..., Any]


def prompts(plan: StepPlan) -> int:
    """Tokens of prompts in a step."""
    return plan.n_tokens - plan.n_decode


def test_a_long_prompt_is_computed_in_pieces_while_an_answer_waits(bench: MakeBench) -> None:
    engine = bench(stall_tokens=10)
    engine.submit(1, range(30), max_new=20)
    assert prompts(engine.step()) == 30, "nobody waits for a token"
    engine.submit(2, range(100, 135), max_new=2)
    engine.submit(3, range(200, 203), max_new=2)
    taken = [(plan.n_decode, prompts(plan)) for plan in (engine.step() for _ in range(4))]
    assert taken == [(1, 10), (1, 10), (1, 10), (1, 8)], "the second's rest and the third share a step"
    engine.drain()
    assert [len(engine.events[number]) for number in (1, 2, 3)] == [20, 2, 2]


def test_without_a_limit_it_is_one_step(bench: MakeBench) -> None:
    engine = bench()
    engine.submit(1, range(30), max_new=20)
    engine.step()
    engine.submit(2, range(100, 135), max_new=2)
    assert prompts(engine.step()) == 35


@pytest.mark.parametrize(("waiting", "taken"), [(4, 10), (6, 10), (9, 22), (12, 40), (200, 60)])
def test_a_crowd_of_prompts_takes_more(bench: MakeBench, waiting: int, taken: int) -> None:
    engine = bench(stall_tokens=10, max_running=4, batch_tokens=61, chunk_tokens=61)
    engine.submit(0, [1, 2], max_new=20)
    engine.step()
    for number in range(1, waiting + 1):
        engine.submit(number, np.arange(40) + 100 * number, max_new=2)
    assert prompts(engine.plan()) == taken


def test_it_is_never_less_than_a_granule(bench: MakeBench) -> None:
    engine = bench(stall_tokens=3, granule=16, slots=320)
    engine.submit(1, range(5), max_new=20)
    engine.step()
    engine.submit(2, range(100, 140), max_new=1)
    assert [prompts(engine.step()) for _ in range(3)] == [16, 16, 8]


@pytest.mark.parametrize("granule", [64, 96, 128, 256])
def test_rounding_leaves_room_for_a_granule(bench: MakeBench, granule: int) -> None:
    engine = bench(stall_tokens=3, granule=granule, slots=8192, batch_tokens=512, chunk_tokens=512, max_input_len=290)
    for number in range(3):
        engine.submit(number, [number, 2], max_new=9)
    engine.step()
    engine.submit(9, range(280), max_new=2)
    taken = [prompts(engine.step()) for _ in range(5)]
    assert taken[0] >= granule and sum(taken) == 280


@pytest.mark.parametrize(("stall", "answers", "total"), [(200, 1, 256), (190, 3, 256), (130, 3, 128), (90, 2, 92)])
def test_a_large_step_fills_the_tiles_of_matrix_products(
    bench: MakeBench, stall: int, answers: int, total: int
) -> None:
    engine = bench(stall_tokens=stall, slots=1024, batch_tokens=512, chunk_tokens=512, max_input_len=290)
    for number in range(answers):
        engine.submit(number, [number, 2], max_new=5)
    engine.step()
    engine.submit(9, range(280), max_new=2)
    engine.submit(10, range(1000, 1280), max_new=2)
    assert engine.plan().n_tokens == total


def test_a_whole_tile_is_rounded_with_the_answers() -> None:
    assert [beside_answers(tokens, 3) for tokens in (TILE - 1, TILE)] == [TILE - 1, TILE - 3]


@given(tokens=st.integers(1, 3000), answers=st.integers(0, 1000))
def test_rounding_to_tiles_takes_at_most_half_a_tile(tokens: int, answers: int) -> None:
    beside = beside_answers(tokens, answers)
    assert abs(beside - tokens) <= TILE // 2
    assert beside == tokens < TILE or (beside + answers) % TILE == 0
