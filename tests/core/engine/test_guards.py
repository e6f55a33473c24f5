"""Policies that fail while requests run cost nobody his answer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from llmcore.api.errors import RequestError
from llmcore.engine.llm import LLM
from llmcore_devtools import fake_answer

MakeLLM = Callable[..., LLM]

MANAGER = """
import numpy as np
from llmcore.api import KVManagerSpec, hookimpl
from llmcore.builtin.radix import RadixCache

@hookimpl
def register_kv_managers():
    yield KVManagerSpec(name="bad", make=f"{{__name__}}:Bad")

class Bad(RadixCache):
    calls = 0
    def {method}(self, *given):
        self.calls += 1
        found = super().{method}(*given)
        return found if self.calls < {good} else {answer}
"""

ESTIMATOR = """
import numpy as np
from llmcore.api import LengthEstimatorSpec, hookimpl

@hookimpl
def register_length_estimators():
    yield LengthEstimatorSpec(name="bad", make=f"{{__name__}}:Bad")

class Bad:
    guaranteed = False
    def __init__(self, limits):
        pass
    def totals(self, produced, max_new, ignore_eos, used):
        return {totals}
    def observe(self, produced):
        {observe}
"""


def check(llm: LLM) -> None:
    """Two rounds of prompts that share a prefix, some of them in a row of two forks, in a pool that runs short."""
    prompts = [[5] * 40 + [i, i + 1] for i in range(12)]
    for _ in range(2):
        results = llm.generate(prompts, temperature=0.0, max_new_tokens=20, n=2)
        for prompt, result in zip(prompts, results, strict=True):
            assert [answer.token_ids for answer in result.answers] == [fake_answer(prompt, 20)] * 2
        load = llm.load()
        assert load.kv_live == 0 and load.kv_cached + load.kv_free == load.kv_total


@pytest.mark.parametrize("granule", [1, 4])
@pytest.mark.parametrize("answer", ["1 / 0", "np.array([3, 3], np.int32)", "np.array([10**6], np.int32)"])
@pytest.mark.parametrize("method", ["match", "insert", "evict"])
def test_a_prefix_cache_that_fails_is_dismissed(
    make_llm: MakeLLM, tmp_path: Path, caplog: pytest.LogCaptureFixture, method: str, answer: str, granule: int
) -> None:
    file = tmp_path / "bad.py"
    file.write_text(MANAGER.format(method=method, answer=answer, good=5))
    llm = make_llm(kv_manager="bad", max_total_token_num=400, plugins=[str(file)], granule=granule)
    check(llm)
    assert caplog.text.count("prefix cache 'bad' has failed") == 1
    assert llm.generate([[5] * 42], temperature=0.0)[0].cached_tokens == 0


def test_a_prefix_cache_speaks_of_itself_until_it_fails(make_llm: MakeLLM, tmp_path: Path) -> None:
    llm = make_llm()
    llm.generate([[5] * 40], temperature=0.0)
    assert llm.load().cache["granules"] == llm.load().kv_cached > 40
    file = tmp_path / "bad.py"
    file.write_text(MANAGER.format(method="stats", answer="1 / 0", good=3))
    llm = make_llm(kv_manager="bad", plugins=[str(file)])
    llm.generate([[5] * 40], temperature=0.0)
    sizes = [llm.load().cache["granules"] for _ in range(4)]
    assert len(set(sizes)) == 1 and sizes[0] > 40, "they are there until somebody needs the room"


@pytest.mark.parametrize("kind", ["forward", "nan"])
def test_after_a_failed_step_a_cache_that_cannot_tell_what_it_holds_loses_it_all(
    make_llm: MakeLLM, tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    file = tmp_path / "bad.py"
    file.write_text(MANAGER.format(method="remove", answer="1 / 0", good=1))
    llm = make_llm(kv_manager="bad", max_total_token_num=400, plugins=[str(file)], fake={"faults": {kind: 250}})
    with pytest.raises(RequestError, match=r"failed|finite"):
        llm.generate([[5] * 40 + [1], [5] * 40 + [250]], temperature=0.0)
    assert "prefix cache 'bad' has failed" in caplog.text
    check(llm)


@pytest.mark.parametrize(
    ("totals", "observe"),
    [("1 / 0", "pass"), ("max_new[:-1]", "pass"), ("max_new * np.nan", "pass"), ("max_new", "1 / 0")],
)
def test_an_estimator_that_fails_is_dismissed(
    make_llm: MakeLLM, tmp_path: Path, caplog: pytest.LogCaptureFixture, totals: str, observe: str
) -> None:
    file = tmp_path / "bad.py"
    file.write_text(ESTIMATOR.format(totals=totals, observe=observe))
    llm = make_llm(length_estimator="bad", max_total_token_num=400, plugins=[str(file)])
    check(llm)
    assert caplog.text.count("length estimator 'bad' has failed") == 1
