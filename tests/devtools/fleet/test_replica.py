"""One simulated replica: its times, its cache, its memory."""

from __future__ import annotations

import pytest
from llmcore.fleet.hits import CHUNK
from llmcore_devtools.fleet import Call, Machine
from llmcore_devtools.fleet.replica import Replica

MACHINE = Machine(prefill_rate=1_000, step=0.01, step_row=0.001, step_kv=0, step_tokens=500, rows=3, kv=4_000)


def call(prompt: int, answer: int = 10, own: int = 1) -> Call:
    return Call(0.0, prompt, answer, 0, 0, own)


def test_times_add_up() -> None:
    assert MACHINE.prefill(1_001) == pytest.approx(1.001 + 3 * 0.01)
    assert MACHINE.decode(2, 100) == pytest.approx(0.012)
    twice = Machine(speed=2.0)
    assert twice.prefill(999, 3, 500) == pytest.approx(Machine().prefill(999, 3, 500) / 2)


def test_short_prompts_share_a_step_and_long_ones_wait() -> None:
    replica = Replica(MACHINE)
    for number, tokens in enumerate((200, 300, 1)):
        replica.add(number, call(tokens, own=number))
    assert replica.waiting == 501 and replica.requests == 3
    assert replica.start() == pytest.approx(MACHINE.prefill(500))
    assert replica.start() is None, "it computes already"
    done = replica.computed()
    assert [running.number for running, _ in done] == [0, 1] and replica.waiting == 1
    assert done[0][1] == pytest.approx(10 * MACHINE.decode(2, replica.live))


def test_the_second_of_two_equal_prompts_is_a_hit() -> None:
    replica = Replica(MACHINE)
    replica.add(0, call(10 * CHUNK))
    replica.start()
    replica.computed()
    replica.finish(0)
    assert replica.live == 0
    replica.add(1, call(10 * CHUNK + 5))
    assert replica.waiting == 5
    assert replica.start() == pytest.approx(MACHINE.prefill(5))


def test_a_request_waits_for_memory_and_evicts_what_is_only_cached() -> None:
    replica = Replica(MACHINE)
    replica.add(0, call(2_000, own=1))
    replica.add(1, call(1_990, own=2))
    replica.start()
    replica.computed()
    assert replica.start() is None, "2,010 + 2,000 tokens are more than 4,000"
    replica.finish(0)
    assert replica.start() is not None
    assert replica.cached(call(2_000, own=1).chunks(2_000)) <= 4_000 - 2_000
    assert replica.requests == 1


def test_no_more_rows_than_the_machine_has() -> None:
    replica = Replica(MACHINE)
    for number in range(5):
        replica.add(number, call(10, own=number))
    replica.start()
    assert len(replica.running) == 3 and len(replica.queue) == 2
