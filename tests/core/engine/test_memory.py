"""Limits, the tokens of KV, and the errors where memory is short."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from llmcore.api.errors import ConfigError, RequestError, ResolveError
from llmcore.api.protocols import Device, SchedulerLimits
from llmcore.builtin.devices.cpu import CPU
from llmcore.config import Config, Memory, Scheduling
from llmcore.engine import build, upload
from llmcore.engine.llm import LLM
from llmcore.engine.memory import fit, kv_capacity, kv_room, scheduler_limits, stall_ms
from llmcore.layers import Build, layout
from llmcore_devtools import fake_answer
from llmcore_devtools.fake_files import read_config

MODEL = read_config({"vocab_size": 9, "max_position_embeddings": 4096, "eos_token_id": 1})


class Small(CPU):
    """A CPU that grants little."""

    def kv_budget(self, fraction: float) -> int:
        return 3200


def config(memory: Memory | None = None, scheduling: Scheduling | None = None) -> Config:
    return Config(memory=memory or Memory(), scheduling=scheduling or Scheduling())


def test_defaults_come_from_model_and_device() -> None:
    limits = scheduler_limits(config(), MODEL, CPU())
    assert (limits.max_total_len, limits.max_input_len) == (4096, 4095)
    assert (limits.batch_tokens, limits.chunk_tokens) == (2048, 2048)
    long = replace(MODEL, max_position=131072)
    assert scheduler_limits(config(), long, CPU()).max_total_len == 16384


@pytest.mark.parametrize(
    ("memory", "scheduling", "words"),
    [
        (Memory(max_req_total_len=5000), Scheduling(), ["5000", "4096", "rope scaling"]),
        (Memory(max_req_input_len=4096), Scheduling(), ["4096", "4095"]),
        (Memory(), Scheduling(chunked_prefill_size=3000), ["3000", "2048", "--batch_max_tokens"]),
        (
            Memory(),
            Scheduling(disable_chunked_prefill=True, prefill_stall_ms=20.0),
            ["--prefill_stall_ms 20", "drop one"],
        ),
    ],
)
def test_contradictions_name_the_way_out(memory: Memory, scheduling: Scheduling, words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        scheduler_limits(config(memory, scheduling), MODEL, CPU())
    assert all(word in str(error.value) for word in words)


def capacity(config: Config, limits: SchedulerLimits, device: Device, token_bytes: int = 32, **room: int) -> int:
    return kv_capacity(config, limits, device, kv_room(config, device, token_bytes, **room), token_bytes)


def test_capacity() -> None:
    limits = scheduler_limits(config(), MODEL, Small())
    assert capacity(config(), limits, Small()) == 100
    assert capacity(config(Memory(max_total_token_num=7)), limits, Small()) == 7
    with pytest.raises(ConfigError, match="3201"):
        capacity(config(), limits, Small(), 3201)
    few = replace(limits, max_running=2, max_total_len=10)
    assert capacity(config(), few, Small()) == 20


def test_lengths_are_cut_to_what_fits_unless_they_were_asked_for() -> None:
    limits = scheduler_limits(config(), MODEL, CPU())
    cut = fit(config(), limits, 100)
    assert (cut.max_total_len, cut.max_input_len) == (100, 99)
    assert fit(config(), limits, 4096) is limits
    for memory in (Memory(max_req_total_len=4096), Memory(max_req_input_len=100)):
        with pytest.raises(ConfigError, match="does not fit"):
            fit(config(memory), limits, 100)


def test_a_fraction_of_memory_that_the_device_does_not_ask_for_is_named(caplog: pytest.LogCaptureFixture) -> None:
    limits = scheduler_limits(config(), MODEL, Small())
    capacity(config(), limits, Small())
    capacity(config(Memory(max_total_token_num=7, mem_fraction=0.5)), limits, Small())
    assert not caplog.text
    capacity(config(Memory(mem_fraction=0.5)), limits, Small())
    assert "--mem_fraction has no effect: on cpu" in caplog.text
    capacity(config(Memory(cache_max_entry_count=0.5)), limits, Small())
    assert "--cache_max_entry_count has no effect: on cpu" in caplog.text


@pytest.mark.parametrize(
    ("share", "left", "tokens"),
    [(None, 9600, 80), (0.5, 3200, 50), (1.0, 1600, 50), (1.0, 9600, 90)],
)
def test_a_share_of_what_the_weights_leave(share: float | None, left: int, tokens: int) -> None:
    class Measured(Small):
        measured = True

        def kv_budget(self, fraction: float) -> int:
            return int(3200 * fraction)

    limits = scheduler_limits(config(), MODEL, Measured())
    asked = config(Memory(cache_max_entry_count=share))
    assert capacity(asked, limits, Measured(), graphs=320, left=left) == tokens


def test_prompts_beside_answers_are_limited_by_the_device_or_the_operator() -> None:
    class Fast(CPU):
        prefill_stall_ms = 25.0

    assert [stall_ms(config(), device) for device in (CPU(), Fast())] == [0.0, 25.0]
    assert stall_ms(config(None, Scheduling(prefill_stall_ms=0.0)), Fast()) == 0.0
    assert stall_ms(config(None, Scheduling(prefill_stall_ms=8.5)), CPU()) == 8.5
    assert stall_ms(config(None, Scheduling(disable_chunked_prefill=True)), Fast()) == 0.0


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
    monkeypatch.setattr(upload, "zeros", out_of_memory(4096 * 900, upload.zeros))
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
        monkeypatch.setattr(layout, "zeros", out_of_memory(4 * 5000, layout.zeros))
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
