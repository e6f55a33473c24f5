"""The admin listener's parts: what it concludes from what the supervisor says, and what it makes of figures."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import falcon
import msgspec
import pytest
from llmcore.api.bridge import Load
from llmcore.api.counters import GAP_SECONDS
from llmcore.api.errors import RequestError
from llmcore.config import Config, make_config
from llmcore_devtools.dialect import FakeTransport
from llmcore_server.http.access import SameOrigin, admin_guard, is_local_name
from llmcore_server.http.admin import board as board_module
from llmcore_server.http.admin.board import KEPT, WINDOW, Board, History, quantile
from llmcore_server.http.reply import Reply
from llmcore_server.messages import EngineStatus, ServerFacts
from llmcore_server.plugin import register_options
from llmcore_server.server_status import Overview

BUCKETS = len(GAP_SECONDS) + 1


def overview(load: Load = Load(), stepped: float | None = None, **more: Any) -> Overview:  # noqa: B008
    base = Overview(
        reason="",
        server=ServerFacts(url="http://x", started=0.0, began=0.0),
        engines=(EngineStatus("engine-0", True, time.monotonic() if stepped is None else stepped, load),),
        facts=None,
        page=("text/plain", b""),
        ended={},
        first_tokens=(0,) * BUCKETS,
        gaps=(0,) * BUCKETS,
        counts=(),
    )
    return msgspec.structs.replace(base, **more)


@pytest.mark.parametrize(
    ("said", "ready", "idle", "reason"),
    [
        (lambda: overview(), True, False, ""),
        (lambda: overview(reason="the engine has stopped"), False, False, "the engine has stopped"),
        (lambda: overview(stepped=0.0), False, True, "a step was tried"),
        (lambda: overview(stepped=time.monotonic() - 99), False, True, "a step was tried"),
        (lambda: overview(stepped=time.monotonic() - 99, load=Load(running=1)), False, False, "no step has finished"),
        (lambda: overview(stepped=time.monotonic() - 9, load=Load(waiting=1)), True, False, ""),
    ],
)
def test_ready_is_what_a_step_says(said: Callable[[], Overview], ready: bool, idle: bool, reason: str) -> None:
    board = Board(30, lambda: None)
    assert not board.verdict().ready and not board.silent, "it has not heard of the supervisor yet"
    board.heard(said())
    verdict = board.verdict()
    assert (verdict.ready, verdict.idle) == (ready, idle)
    assert reason in verdict.reason and verdict.status == (200 if ready else 503)


def test_a_supervisor_that_is_silent_is_not_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    board = Board(30, lambda: None)
    board.heard(overview())
    assert not board.silent
    monkeypatch.setattr(board_module, "SILENCE_SECONDS", -1.0)
    assert board.silent and not board.verdict().ready


def test_uptime_does_not_go_by_the_wall_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time", lambda: 0.0)
    assert ServerFacts(url="", started=1e9, began=time.monotonic() - 90).uptime == pytest.approx(90, abs=5)


def test_who_waits_for_a_step_is_answered_by_it_or_at_the_end_of_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    board = Board(30, lambda: asked.append(1))
    board.heard(overview(stepped=0.0))
    transports = [FakeTransport(falcon.Response()) for _ in range(2)]
    for transport in transports:
        reply = Reply(transport)
        reply.attach()
        board.await_step(reply)
    board.tick()
    assert board.awaited and len(asked) == 2 and not transports[0].ended
    board.heard(overview())
    board.tick()
    assert [transport.status for transport in transports] == [200, 200] and not board.awaited
    board.heard(overview(stepped=0.0))
    monkeypatch.setattr(board_module, "PROBE_SECONDS", 0.0)
    late = FakeTransport(falcon.Response())
    reply = Reply(late)
    reply.attach()
    board.await_step(reply)
    time.sleep(0.01)
    board.tick()
    assert late.status == 503 and b"a step was tried" in late.sent


def test_quantiles_lie_between_the_ends_of_their_bucket() -> None:
    counts = [0] * BUCKETS
    assert quantile(counts, 0.5) is None
    counts[5] = 100  # from 7.5 to 10 ms
    assert GAP_SECONDS[4] < quantile(counts, 0.01) < quantile(counts, 0.99) < GAP_SECONDS[5]  # type: ignore[operator]
    counts[-1] = 900
    assert quantile(counts, 0.99) == GAP_SECONDS[-1], "nothing is known beyond the last end"


def test_samples_are_rates_of_one_second_and_the_newest_are_kept() -> None:
    history = History()
    for second in range(KEPT + 20):
        gaps = [0] * BUCKETS
        gaps[3] = 50 * second
        load = Load(steps=second, output_tokens=50 * second, prompt_tokens=20 * second, cached_tokens=5 * second)
        history.add(overview(load=load, gaps=tuple(gaps), ended={"stop": 2 * second}), float(second), 1000.0 + second)
        history.add(overview(load=load), second + 0.5, 1000.5 + second)  # too early: it is left out
    samples = history.since(0)
    assert len(samples) == KEPT
    newest = samples[-1]
    assert (newest.output_rate, newest.prompt_rate, newest.finish_rate, newest.hit) == (50, 20, 2, 0.25)
    assert newest.between[0] is not None and GAP_SECONDS[2] < newest.between[0] < GAP_SECONDS[3]
    assert newest.first_token == (None, None, None)
    assert history.since(newest.time - 2) == samples[-2:]


def test_another_engine_makes_no_negative_rates() -> None:
    history = History()
    for second in range(WINDOW):
        history.add(overview(load=Load(steps=100 + second, output_tokens=10**6)), float(second), float(second))
    for second in range(WINDOW, WINDOW + 3):
        history.add(overview(load=Load(steps=second, output_tokens=second)), float(second), float(second))
    assert all(sample.output_rate >= 0 for sample in history.since(0))


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.1:8001", "[::1]:8001", "localhost", "LOCALHOST:1", "10.0.0.7"])
def test_addresses_and_localhost_are_local_names(host: str) -> None:
    assert is_local_name(host)


@pytest.mark.parametrize("host", ["", "evil.test", "127.0.0.1.evil.test", "localhost.evil.test", "[evil]", "0x7f.1"])
def test_other_names_are_not(host: str) -> None:
    assert not is_local_name(host)


def test_a_name_is_enough_where_keys_are_needed_anyway() -> None:
    def ask(guard: SameOrigin, **headers: str) -> RequestError | None:
        return guard.check({"HOST": "llm.corp.test", **headers})

    local = admin_guard(Config())
    away = admin_guard(make_config(register_options(), admin_host="0.0.0.0", api_keys="k"))
    assert ask(away) is None and ask(away, ORIGIN="https://llm.corp.test") is None
    assert ask(local, HOST="127.0.0.1:8001") is None
    for guard, headers in ((local, {}), (away, {"ORIGIN": "https://x.test"})):
        refused = ask(guard, **headers)
        assert refused is not None and refused.status == 403
