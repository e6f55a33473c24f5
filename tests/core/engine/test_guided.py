"""Guided rows in the real engine: crowded, preempted, late and ahead, they are what they are alone."""

from __future__ import annotations

import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from llmcore.engine import token_masks
from llmcore.engine.llm import LLM
from llmcore_devtools import fake_answer

AHEAD = str(Path(__file__).parent / "ahead_device.py")
PATTERN = "([a-f]{3}[0-9]){15}"


@pytest.mark.parametrize("ahead", [0, 1])
def test_crowded_and_preempted(make_llm: Callable[..., LLM], ahead: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_masks, "_PATIENCE", 0.0)
    llm = make_llm(
        plugins=["guided", AHEAD],
        device="cpu-ahead" if ahead else "cpu",
        max_total_token_num=140,
        length_estimator="capped",
        router_max_new_token_len=1,
    )
    guided: dict[str, Any] = {
        "logits_processors": [{"name": "guided", "args": {"regex": PATTERN}}],
        "temperature": 1.0,
        "ignore_eos": True,
    }
    prompts = [[1, 2, 3], [9], [7, 7], [5] * 7]

    def ask(i: int) -> Any:
        if i % 2:
            return llm.generate([prompts[i // 2]], max_new_tokens=60, temperature=0.0)[0].token_ids
        return llm.generate([prompts[i // 2]], max_new_tokens=80, seed=i, **guided)[0].text

    with ThreadPoolExecutor(8) as pool:
        crowded = list(pool.map(ask, range(8)))
    assert llm.load().preemptions > 0
    assert crowded == [ask(i) for i in range(8)]
    assert crowded[1::2] == [fake_answer(prompt, 60) for prompt in prompts]
    assert all(re.fullmatch(PATTERN, text) for text in crowded[::2])
    answers = llm.generate([[4]], n=3, max_new_tokens=80, seed=1, **guided)[0].answers
    assert all(re.fullmatch(PATTERN, answer.text) and answer.finish_reason == "stop" for answer in answers)
    assert len({answer.text for answer in answers}) == 3
