"""`--cache_block_seq_len`: another unit of allocation, the same answers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from llmcore.engine.llm import LLM
from llmcore_devtools import fake_answer


@pytest.mark.parametrize("granule", [3, 16])
def test_kv_comes_in_units_of_it(granule: int, make_llm: Callable[..., LLM]) -> None:
    llm = make_llm(cache_block_seq_len=granule, max_total_token_num=100, max_req_total_len=48)
    assert llm.load().kv_total == 100 // granule * granule
    [answer] = llm.generate([[5] * 20], max_new_tokens=10, temperature=0.0)
    assert answer.token_ids == fake_answer([5] * 20, 10)
