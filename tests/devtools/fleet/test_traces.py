"""Traces for a fleet: what each has, and that chunks of different texts differ."""

from __future__ import annotations

from collections import Counter, defaultdict
from itertools import pairwise

import pytest
from llmcore.fleet.hits import CHUNK
from llmcore_devtools.fleet import TRACES, Call, Trace, make_trace

LENGTHS = ((30, 200), (150, 300), (900, 100))


def made(name: str, replicas: int = 20, requests: int = 1_000) -> Trace:
    return make_trace(name, LENGTHS, replicas, requests)


@pytest.mark.parametrize("name", TRACES)
def test_calls_come_in_order_and_are_as_many_as_asked_for(name: str) -> None:
    trace = made(name)
    times = [call.time for call in trace.calls]
    assert times == sorted(times) and len(times) == 1_000 and times[0] >= 0
    assert trace == made(name) and trace != make_trace(name, LENGTHS, 20, 1_000, seed=1)


def test_an_unknown_trace_is_a_key_error() -> None:
    with pytest.raises(KeyError):
        made("none")


def test_chunks_are_shared_as_far_as_the_common_text() -> None:
    one, two = Call(0, 300, 100, 5, 128, 50), Call(0, 400, 10, 5, 128, 51)
    assert one.chunks(300)[:2] == two.chunks(400)[:2]
    assert not set(one.chunks(300)[2:]) & set(two.chunks(400)[2:])
    assert len(one.chunks(300)) == 300 // CHUNK and one.chunks(400)[: 300 // CHUNK] == one.chunks(300)


def test_a_few_prefixes_are_frequent() -> None:
    counts = Counter(call.common for call in made("zipf").calls).most_common()
    assert counts[0][1] > 100 and len(counts) > 100


def test_turns_repeat_what_came_before() -> None:
    sessions = defaultdict(list)
    for call in made("sessions").calls:
        sessions[call.own].append(call)
    several = [sorted(turns, key=lambda call: call.prompt) for turns in sessions.values() if len(turns) > 1]
    assert len(several) > 100
    for turns in several:
        for before, after in pairwise(turns):
            assert after.prompt > before.prompt + before.answer
            assert after.chunks(before.prompt + before.answer) == before.chunks(before.prompt + before.answer)


def test_turns_wait_for_the_answer_before_them() -> None:
    calls = made("turns").calls
    first = [call for call in calls if call.after is None]
    assert list(calls[: len(first)]) == first and {call.time for call in calls} == {0.0}
    for number, call in enumerate(calls[len(first) :], len(first)):
        before = calls[call.after or 0]
        assert before.own == call.own and (call.after or 0) < number
        assert before.prompt + before.answer < call.prompt <= before.prompt + before.answer + 400


def test_most_begin_with_the_hot_prefix() -> None:
    hot = sum(call.shared > 0 for call in made("hot").calls)
    assert 550 < hot < 650


def test_some_replicas_are_slow_and_some_die() -> None:
    assert sum(machine.speed < 1 for machine in made("slow").fleet.machines) == 2
    trace = made("deaths")
    assert len(trace.fleet.deaths) == 1
    assert all(0 < death < birth < trace.calls[-1].time for death, birth in trace.fleet.deaths.values())
