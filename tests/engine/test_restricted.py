"""Requests that say which tokens may be drawn, and how fast an end becomes likely, alone and beside others."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from llmcore.bridge import LengthDecay
from llmcore.engine.llm import LLM
from llmcore.testing import fake_answer

MakeLLM = Callable[..., LLM]

PLAIN = [3, 4, 5]
AHEAD = pytest.mark.parametrize("ahead", [0, 1])


@AHEAD
def test_only_allowed_tokens_are_drawn_and_neighbours_do_not_notice(make_llm: MakeLLM, ahead: int) -> None:
    llm = make_llm(ahead=ahead)
    allowed = (7, 100, 200)
    for sampling in ({"temperature": 0.0}, {"temperature": 1.0, "seed": 3}):
        (alone,) = llm.generate([[1, 2]], allowed_ids=allowed, max_new_tokens=20, **sampling)
        assert set(alone.token_ids) <= set(allowed) and len(alone.token_ids) == 20
        tree = llm.generate([[1, 2]], allowed_ids=allowed, max_new_tokens=20, n=3, **sampling)[0]
        assert all(set(answer.token_ids) <= set(allowed) for answer in tree.answers)
        assert tree.answers[0].token_ids == alone.token_ids
    (plain,) = llm.generate([PLAIN], temperature=0.0, max_new_tokens=40)
    assert plain.token_ids == fake_answer(PLAIN, 40)


@AHEAD
def test_a_mask_leaves_with_its_request(make_llm: MakeLLM, ahead: int) -> None:
    llm = make_llm(ahead=ahead, running_max_req_size=1)
    for _ in range(3):
        assert set(llm.generate([[1, 2]], temperature=0.0, allowed_ids=(5,))[0].token_ids) == {5}
        assert llm.generate([PLAIN], temperature=0.0)[0].token_ids == fake_answer(PLAIN, 16)


@AHEAD
def test_an_end_becomes_likely_with_the_length(make_llm: MakeLLM, ahead: int) -> None:
    """The fake model's answers score 11, others up to 8: a token of score s wins after log(11 / s) / log(factor)."""
    llm = make_llm(ahead=ahead)
    plain = fake_answer(PLAIN, 30)
    ends = [token for token in range(257) if token not in plain]
    options = {"temperature": 0.0, "max_new_tokens": 30}
    decay = LengthDecay(start=6, factor=40.0, ids=tuple(ends))
    (answer,) = llm.generate([PLAIN], length_decay=decay, **options)
    assert answer.token_ids[:7] == plain[:7]
    assert answer.token_ids[7] in ends
    (later,) = llm.generate([PLAIN], length_decay=LengthDecay(start=12, factor=40.0, ids=tuple(ends)), **options)
    assert later.token_ids[:13] == plain[:13] and later.token_ids[13] in ends
    (never,) = llm.generate([PLAIN], length_decay=LengthDecay(start=6, factor=1.0, ids=tuple(ends)), **options)
    assert never.token_ids == plain
    (banned,) = llm.generate([PLAIN], length_decay=decay, logit_bias=dict.fromkeys(ends, float("-inf")), **options)
    assert banned.token_ids == plain
