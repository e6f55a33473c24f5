"""Requests that say which tokens may be drawn, and how fast an end becomes likely, alone and beside others."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from llmcore.api.bridge import LengthDecay
from llmcore.engine.llm import LLM
from llmcore.text.bad_words import sequences_of
from llmcore_devtools import fake_answer
from steered import GREEDY, together

MakeLLM = Callable[..., LLM]

PLAIN = [3, 4, 5]
PROMPTS = [PLAIN, [7, 8], [9, 9, 9, 9], [1, 2]]
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


@AHEAD
def test_bad_words_are_never_completed_and_neighbours_do_not_notice(make_llm: MakeLLM, ahead: int) -> None:
    """Token by token, the best of those that complete no word, and the same beside others."""
    llm = make_llm(ahead=ahead)
    plain = [fake_answer(prompt, 24) for prompt in PROMPTS]
    words = [llm.tokenizer.decode(plain[0][3:4]), llm.tokenizer.decode(plain[0][6:9])]
    sequences = sequences_of(words, llm.tokenizer, llm.facts.vocab_size)
    assert {tuple(plain[0][3:4]), tuple(plain[0][6:9])} <= set(sequences)
    expected: list[int] = []
    for _ in range(24):
        (answer,) = llm.generate([[*PROMPTS[0], *expected]], temperature=0.0, max_new_tokens=1, logprobs=20)
        best = (token for token, _ in answer.answers[0].top_logprobs[0])
        expected.append(next(t for t in best if not any(completes([*expected, t], ids) for ids in sequences)))
    assert expected != plain[0]
    assert llm.generate(PROMPTS[:1], bad_words=words, max_new_tokens=24, **GREEDY)[0].token_ids == expected
    options: list[dict[str, object]] = [{"bad_words": words}, {}, {"bad_words": words[0]}, {}]
    found = together(llm, PROMPTS, options, 24)
    assert found[0] == expected and found[1] == plain[1] and found[3] == plain[3]
    for seed in range(5):
        (drawn,) = llm.generate(PROMPTS[:1], bad_words=words, temperature=1.5, seed=seed, max_new_tokens=60)
        ends = (drawn.token_ids[:end] for end in range(1, len(drawn.token_ids) + 1))
        assert not any(completes(end, ids) for end in ends for ids in sequences)


@AHEAD
def test_typical_p_and_top_p_0(make_llm: MakeLLM, ahead: int) -> None:
    """Beside others each draws what it draws alone; a share of 1 changes nothing; top_p 0 is greedy."""
    llm = make_llm(ahead=ahead)
    options: list[dict[str, object]] = [
        {"temperature": 4.0, "seed": 5, "typical_p": 0.3},
        {"temperature": 4.0, "seed": 5},
        {"temperature": 1.0, "seed": 5, "top_p": 0.0},
        {"temperature": 4.0, "seed": 5, "typical_p": 0.3, "top_k": 20, "repetition_penalty": 1.3},
    ]
    alone = [
        llm.generate([prompt], max_new_tokens=20, ignore_eos=True, **option)[0].token_ids
        for prompt, option in zip(PROMPTS, options, strict=True)
    ]
    assert together(llm, PROMPTS, options, 20) == alone
    assert alone[2] == fake_answer(PROMPTS[2], 20)
    (same,) = llm.generate(PROMPTS[:1], max_new_tokens=20, ignore_eos=True, temperature=4.0, seed=5, typical_p=1.0)
    (without,) = llm.generate(PROMPTS[:1], max_new_tokens=20, ignore_eos=True, temperature=4.0, seed=5)
    assert same.token_ids == without.token_ids != alone[0]


def completes(answer: list[int], sequence: tuple[int, ...]) -> bool:
    return tuple(answer[-len(sequence) :]) == sequence
