"""A rank that cannot follow says so, and ends."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from grouped import ThreadGroup
from llmcore.api.errors import ConfigError, LlmcoreError
from llmcore.engine import llm as llm_module
from llmcore.engine.llm import LLM
from llmcore.engine.rank_messages import Begin, Drawn, Follow, Go, Make, RankLost, ToRank
from steered import GREEDY

MakeLLM = Callable[..., LLM]


def lost(group: ThreadGroup) -> str:
    """The error of its second rank, which has ended."""
    group.join()
    (error,) = group.errors
    assert isinstance(error, RankLost)
    group.errors.clear()
    group.threads.clear()
    group.engine = None
    return str(error)


def test_ranks_know_once_when_the_engine_is_ready(make_llm: MakeLLM, groups: list[ThreadGroup]) -> None:
    make_llm().generate([[1]], max_new_tokens=2, **GREEDY)
    assert groups[0].ready == [1]


OTHER = """
from llmcore.api import KernelSpec, Requires, hookimpl

@hookimpl
def register_kernels():
    yield KernelSpec(op="kv_slots", name="other", make="llmcore.ops.kv_slots:make", when=Requires(device="cpu"))
"""


def test_other_kernels_are_refused(make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    plugin = tmp_path / "other.py"
    plugin.write_text(OTHER)
    group = ThreadGroup()
    group.config_of = lambda rank, config: replace(config, kernels=replace(config.kernels, kernel=("kv_slots=torch",)))
    monkeypatch.setattr(llm_module, "build_engine", group.build)
    said = r"rank 1 cannot .* rank 0: kv_slots on cpu.* kernel torch there .* other here; .* --kernel kv_slots=other"
    with pytest.raises(ConfigError, match=said):
        make_llm(plugins=[str(plugin)])
    group.end()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda step: msgspec.structs.replace(step, check=step.check ^ 1),
            r"in step \d+: .*packs the step differently",
        ),
        (lambda step: msgspec.structs.replace(step, plan=b"?"), r"rank 1 failed in step \d+: "),
        (lambda step: Go(True), "agreed on a capture that this rank has not made"),
        (lambda step: Drawn(step.number, b"\0\0\0\0", ()), r"tokens of step \d+, which does not wait for any"),
        (lambda step: Make(-9, 0), r"rank 1 failed in step \d+: "),
    ],
)
def test_a_rank_that_cannot_follow_says_why(
    make_llm: MakeLLM, groups: list[ThreadGroup], change: Callable[[Follow], ToRank], said: str
) -> None:
    llm = make_llm()
    llm.generate([[1]], max_new_tokens=2, **GREEDY)
    groups[0].link.change = lambda message: change(message) if isinstance(message, Follow) else message
    llm.generate([[2]], max_new_tokens=1, **GREEDY)
    assert re.search(said, lost(groups[0]))


@pytest.mark.parametrize("missing", [Begin, Make])
def test_what_a_step_needs_must_come_before_it(
    make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch, missing: type
) -> None:
    group = ThreadGroup()
    group.link.change = lambda message: Go(True) if isinstance(message, missing) else message
    monkeypatch.setattr(llm_module, "build_engine", group.build)
    with pytest.raises(LlmcoreError, match="rank 1: RankLost"):
        make_llm()
    assert "rank 1 failed in its start" in lost(group)
