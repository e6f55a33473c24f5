"""Plans that are encoded and decoded on their way to the runner; `--encode-plans` runs all tests of this folder so."""

from __future__ import annotations

from collections.abc import Callable

from llmcore.engine.llm import LLM
from llmcore_devtools import fake_answer
from steered import AHEAD, ANSWERS, GREEDY, together, use

PROMPTS = [[1, 2, 3], [9], [7, 7], [5] * 7]


@AHEAD
def test_answers_are_the_same(steered: Callable[..., LLM], encoded_plans: list[int], ahead: int) -> None:
    """Beside rows that decode and choices that fork: a row whose masks come from the host, and one with penalties."""
    llm = steered(ahead, granule=4)
    started = len(encoded_plans)
    options = [use("lists", lists=[[3], [5]]), {}, {"n": 2}, {"repetition_penalty": 1.3, "seed": 3}]
    answers = together(llm, PROMPTS, options, 12)
    assert answers[0] == [3] + [5] * 11
    assert answers[1:3] == [fake_answer(prompt, 12) for prompt in PROMPTS[1:3]]
    assert len(answers[3]) == 12 and max(answers[3]) < ANSWERS
    assert len(encoded_plans) >= started + 12 and min(encoded_plans) > 100
    assert llm.generate([[4, 2]], max_new_tokens=5, **GREEDY)[0].token_ids == fake_answer([4, 2], 5)
