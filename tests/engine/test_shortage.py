"""An accelerator with too little of everything: what cannot start says what would, and shows what it measured."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from llmcore.builtin import token_layout
from llmcore.engine import build, tables
from llmcore.engine.llm import LLM
from llmcore.errors import ConfigError, RequestError, ResolveError
from llmcore.layers import Build
from llmcore_devtools import fake_answer

AHEAD = str(Path(__file__).with_name("ahead_device.py"))
ROOM = 2400
"""Tokens of the fake model that fit into the device `short` at the default fraction."""

MEASURED = "measured: 700 MiB of 1,024 MiB free before the start, at most 300 MiB in use by llmcore since"
HALF = """
from llmcore.api import KernelSpec, Requires, hookimpl

@hookimpl
def register_kernels():
    half = Requires(device="cuda", dtypes=frozenset({"f16", "bf16"}))
    yield KernelSpec(op="kv_slots", name="half", make="x:y", when=half)
"""

MakeLLM = Callable[..., LLM]


@pytest.fixture
def start(make_llm: MakeLLM) -> Callable[..., LLM]:
    """`start(**settings)` on the device `short`."""

    def start(*plugins: str, **settings: Any) -> LLM:
        given = {"max_total_token_num": None, "device": "short", "plugins": [AHEAD, *plugins], **settings}
        return make_llm(fake={"max_position": 4096}, **given)

    return start


def refused(start: Callable[..., LLM], **settings: Any) -> str:
    with pytest.raises(ConfigError) as error:
        start(**settings)
    return str(error.value)


def out_of_memory(limit: int, real: Callable[..., Any]) -> Callable[..., Any]:
    """`real`, as on a device where tensors of more elements than `limit` do not fit."""

    def allocate(shape: tuple[int, ...], *more: Any) -> Any:
        if torch.Size(shape).numel() > limit:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate much.\nA long text follows.")
        return real(shape, *more)

    return allocate


def test_weights(start: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch) -> None:
    real = Build.empty

    def empty(self: Build, *shape: int) -> torch.nn.Parameter:
        if self.torch_device.type != "meta":
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return real(self, *shape)

    monkeypatch.setattr(Build, "empty", empty)
    text = refused(start)
    assert "the weights do not fit into the 1,024 MiB of Old and Small; take a smaller model or --data_type" in text
    assert "\npredicted: weights 0 MiB, a step" in text and MEASURED in text


def test_the_largest_step(start: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(*given: Any) -> int:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(build, "measure", measure)
    text = refused(start)
    assert text.startswith("the largest step does not fit beside the weights (CUDA out of memory)")
    assert "lower --batch_max_tokens" in text and MEASURED in text


def test_tables(start: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "zeros", out_of_memory(4096 * 900, tables.zeros))
    text = refused(start, running_max_req_size=1000)
    assert "tables for 1000 requests of 4096 tokens" in text and "lower --running_max_req_size" in text


def test_no_kv_at_all(start: Callable[..., LLM]) -> None:
    text = refused(start, mem_fraction=0.5)
    assert "room for 0 tokens of 32 bytes" in text and "raise --mem_fraction" in text
    assert "\npredicted: weights" in text and MEASURED in text


def test_longer_requests_than_fit(start: Callable[..., LLM]) -> None:
    text = refused(start, max_req_total_len=3000)
    assert f"--max_req_total_len 3000 does not fit: there is room for {ROOM} tokens of KV; lower it to {ROOM}" in text
    assert "\npredicted: weights" in text and MEASURED in text
    assert start(max_req_total_len=ROOM).generate([[3]], temperature=0.0)[0].token_ids == fake_answer([3], 16)


def test_the_default_length_is_cut_and_longer_requests_are_refused(
    start: Callable[..., LLM], caplog: pytest.LogCaptureFixture
) -> None:
    llm = start()
    assert f"requests may have {ROOM} tokens instead of 4096" in caplog.text
    for prompt, answer in ((ROOM, 1), (ROOM - 10, 11)):
        with pytest.raises(RequestError, match=f"at most {ROOM - 1 if answer == 1 else ROOM} are allowed") as error:
            llm.generate([[3] * prompt], max_new_tokens=answer)
        assert error.value.code == "context_length_exceeded"
    (result,) = llm.generate([[3] * (ROOM - 10)], temperature=0.0, max_new_tokens=10)
    assert result.token_ids == fake_answer([3] * (ROOM - 10), 10)


@pytest.mark.parametrize("where", ["the pool", "the step beside it"])
def test_more_slots_than_fit(start: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    def run_worst_case(*given: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    if where == "the pool":
        monkeypatch.setattr(token_layout, "zeros", out_of_memory(4 * 5000, token_layout.zeros))
    else:
        monkeypatch.setattr(build, "run_worst_case", run_worst_case)
    text = refused(start, max_total_token_num=6000)
    assert "--max_total_token_num 6000 does not fit" in text and f"room for {ROOM} tokens" in text
    assert f"lower it to {ROOM} or less" in text and "A long text" not in text and MEASURED in text


@pytest.mark.parametrize("slots", [1, 1 << 31])
def test_slots_that_no_request_fits_or_nobody_can_number(start: Callable[..., LLM], slots: int) -> None:
    assert f"--max_total_token_num {slots} is not between 2," in refused(start, max_total_token_num=slots)


def test_a_capability_that_kernels_decline(start: Callable[..., LLM], caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ResolveError, match=r"--kernel kv_slots=triton does not fit .*needs capability 80-129, has 75"):
        start("triton", kernel=["kv_slots=triton"])
    llm = start("triton")
    assert "kv_slots runs as its slower torch reference, triton: needs capability 80-129, has 75" in caplog.text
    assert llm.generate([[3]], temperature=0.0)[0].token_ids == fake_answer([3], 16)


def test_a_dtype_that_a_kernel_declines(start: Callable[..., LLM], tmp_path: Path) -> None:
    (tmp_path / "half.py").write_text(HALF)
    half = str(tmp_path / "half.py")
    with pytest.raises(ResolveError) as error:
        start(half, kernel=["kv_slots=half"])
    assert "half does not fit kv_slots on cuda 75, f32" in str(error.value)
    assert "needs dtype bf16 or f16, has f32" in str(error.value) and "\n  torch (ops): fits" in str(error.value)
    assert start(half).generate([[3]], temperature=0.0)[0].token_ids == fake_answer([3], 16)
