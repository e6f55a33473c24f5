"""What settings, model and device make of each other; every contradiction says what to do."""

from __future__ import annotations

from dataclasses import replace

import pytest
from llmcore.builtin.devices.cpu import CPU
from llmcore.config import Config, Memory, Scheduling
from llmcore.engine.limits import Room, fit, kv_capacity, scheduler_limits, stall_ms
from llmcore.errors import ConfigError
from llmcore_devtools import fake_config

MODEL = fake_config.read_config({"vocab_size": 9, "max_position_embeddings": 4096, "eos_token_id": 1})


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


def test_capacity() -> None:
    limits = scheduler_limits(config(), MODEL, Small())
    assert kv_capacity(config(), limits, Small(), Room(token_bytes=32)) == 100
    assert kv_capacity(config(Memory(max_total_token_num=7)), limits, Small(), Room(token_bytes=32)) == 7
    with pytest.raises(ConfigError, match="3201"):
        kv_capacity(config(), limits, Small(), Room(token_bytes=3201))
    few = replace(limits, max_running=2, max_total_len=10)
    assert kv_capacity(config(), few, Small(), Room(token_bytes=32)) == 20


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
    kv_capacity(config(), limits, Small(), Room(token_bytes=32))
    kv_capacity(config(Memory(max_total_token_num=7, mem_fraction=0.5)), limits, Small(), Room(token_bytes=32))
    assert not caplog.text
    kv_capacity(config(Memory(mem_fraction=0.5)), limits, Small(), Room(token_bytes=32))
    assert "--mem_fraction has no effect: on cpu" in caplog.text
    kv_capacity(config(Memory(cache_max_entry_count=0.5)), limits, Small(), Room(token_bytes=32))
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
    room = Room(token_bytes=32, graphs=320, left=left)
    assert kv_capacity(config(Memory(cache_max_entry_count=share)), limits, Measured(), room) == tokens


def test_prompts_beside_answers_are_limited_by_the_device_or_the_operator() -> None:
    class Fast(CPU):
        prefill_stall_ms = 25.0

    assert [stall_ms(config(), device) for device in (CPU(), Fast())] == [0.0, 25.0]
    assert stall_ms(config(None, Scheduling(prefill_stall_ms=0.0)), Fast()) == 0.0
    assert stall_ms(config(None, Scheduling(prefill_stall_ms=8.5)), CPU()) == 8.5
    assert stall_ms(config(None, Scheduling(disable_chunked_prefill=True)), Fast()) == 0.0
