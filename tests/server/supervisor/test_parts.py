from __future__ import annotations

import fcntl
import os
import socket
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from llmcore.api.bridge import Load
from llmcore.api.errors import ConfigError
from llmcore.api.protocols import MetricSink
from llmcore.registry.registry import Registry
from llmcore_server.messages import Snapshot
from llmcore_server.supervisor import entrance
from llmcore_server.supervisor.figures import Sinks, ThroughputLog
from llmcore_server.supervisor.rundir import RunDirectory
from llmcore_server.supervisor.watchdog import LOADING_SECONDS, START_SECONDS, Clock, Silence, Watchdog


def snapshot(steps: int, *, running: int = 1, paused: bool = False) -> Snapshot:
    return Snapshot(Load(steps=steps, running=running), paused=paused)


class TestWatchdog:
    def test_work_pending_and_no_step(self) -> None:
        dog = Watchdog(30, now=0)
        dog.ready(0)
        for second in range(1, 31):
            dog.heard(snapshot(7), second)
            assert not dog.hung(second)
        assert dog.hung(31.5)

    def test_steps_are_progress(self) -> None:
        dog = Watchdog(30, now=0)
        dog.ready(0)
        for second in range(100):
            dog.heard(snapshot(second), second)
            assert not dog.hung(second)

    def test_an_idle_engine_is_not_hung_while_it_reports(self) -> None:
        dog = Watchdog(30, now=0)
        dog.ready(0)
        for second in range(100):
            dog.heard(snapshot(5, running=0), second)
            assert not dog.hung(second)

    def test_silence_is_hung_whatever_was_pending(self) -> None:
        dog = Watchdog(30, now=0)
        dog.ready(0)
        dog.heard(snapshot(5, running=0), 1)
        assert not dog.hung(30)
        assert dog.hung(32)

    def test_compilation_does_not_count(self) -> None:
        dog = Watchdog(30, now=0)
        dog.ready(0)
        dog.heard(snapshot(5, paused=True), 1)
        assert not dog.hung(1000)
        dog.heard(snapshot(5), 1000)
        assert not dog.hung(1029)
        assert dog.hung(1031)

    def test_while_it_loads_progress_counts(self) -> None:
        dog = Watchdog(30, now=0)
        assert not dog.hung(LOADING_SECONDS)
        dog.loaded_more(LOADING_SECONDS)
        assert not dog.hung(2 * LOADING_SECONDS)
        assert "no further with loading" in dog.hung(2 * LOADING_SECONDS + 1)


class TestSilence:
    def test_who_never_spoke_has_a_limit_of_its_own(self) -> None:
        silence = Silence(2, now=5)
        assert not silence.hung(5 + START_SECONDS)
        assert silence.hung(6 + START_SECONDS) == "did not serve within 60 s"

    def test_who_spoke_is_to_speak_again(self) -> None:
        silence = Silence(2, now=5)
        silence.heard(10)
        assert not silence.hung(12)
        assert silence.hung(12.1) == "was silent for 2 s"


def test_time_that_the_supervisor_did_not_look_hardly_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([100.0, 100.25, 5000.0, 5000.1])
    monkeypatch.setattr("time.monotonic", lambda: next(times))
    clock = Clock()
    seen = []
    for _ in range(3):
        clock.look()
        seen.append(clock.now)
    assert seen == pytest.approx([0.25, 0.75, 0.85])


class TestListener:
    def test_clients_are_refused_until_it_listens(self) -> None:
        with entrance.bind("127.0.0.1", 0) as bound:
            address = bound.getsockname()
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(address)
            entrance.listen(bound)
            socket.create_connection(address).close()

    def test_a_port_that_another_took_meanwhile(self) -> None:
        with entrance.bind("127.0.0.1", 0) as first, entrance.bind("127.0.0.1", first.getsockname()[1]) as second:
            entrance.listen(first)
            with pytest.raises(ConfigError, match="in use"):
                entrance.listen(second)

    @pytest.mark.parametrize("host", ["no.such.host.invalid", "192.0.2.1"])
    def test_an_address_that_is_not_ours_names_the_option(self, host: str) -> None:
        with pytest.raises(ConfigError, match=r"--host|0\.0\.0\.0"):
            entrance.bind(host, 0)

    @pytest.mark.parametrize(("host", "shown"), [("0.0.0.0", "http://127.0.0.1:"), ("127.0.0.1", "http://127.0.0.1:")])
    def test_its_url_can_be_opened_from_this_machine(self, host: str, shown: str) -> None:
        with entrance.bind(host, 0) as bound:
            assert entrance.listener_url(bound) == f"{shown}{bound.getsockname()[1]}"


class TestRunDirectory:
    @pytest.fixture(autouse=True)
    def _elsewhere(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
        monkeypatch.setattr("llmcore_server.supervisor.rundir.IPC_ROOT", tmp_path)

    def test_is_private_and_goes(self, tmp_path: Path) -> None:
        directory = RunDirectory("ipc:///tmp/")
        assert directory.path.parent == tmp_path
        assert directory.path.stat().st_mode & 0o777 == 0o700
        assert directory.address("engine") == f"ipc://{directory.path}/engine"
        directory.remove()
        assert list(tmp_path.iterdir()) == []

    def test_tcp_means_loopback(self) -> None:
        directory = RunDirectory("tcp://")
        assert directory.address("engine").startswith("tcp://127.0.0.1:")
        directory.remove()

    def test_cleaners_of_tmp_are_told_that_it_is_in_use(self) -> None:
        directory = RunDirectory("ipc:///tmp/")
        seen = os.open(directory.path, os.O_RDONLY | os.O_DIRECTORY)
        with pytest.raises(BlockingIOError):  # what systemd-tmpfiles tries before it looks into one
            fcntl.flock(seen, fcntl.LOCK_EX | fcntl.LOCK_NB)
        directory.remove()
        fcntl.flock(seen, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(seen)

    def test_what_a_killed_server_left_is_removed_and_what_runs_is_not(self) -> None:
        alive = RunDirectory("ipc:///tmp/")
        stale = RunDirectory("ipc:///tmp/")
        stale_path = stale.path
        os.close(stale._lock)
        third = RunDirectory("ipc:///tmp/")
        assert not stale_path.exists()
        assert alive.path.exists()
        for directory in (alive, third):
            directory.remove()

    def test_logs_outlive_it_only_when_they_say_something(self) -> None:
        directory = RunDirectory("ipc:///tmp/")
        assert directory.keep_log("engine-0") is None
        directory.log("engine-0").write_text("stacks")
        kept = directory.keep_log("engine-0")
        directory.remove()
        assert kept is not None and kept.read_text() == "stacks"
        assert kept.stat().st_mode & 0o777 == 0o600


def sinks_of(*sinks: object) -> Sinks:
    found = Sinks(cast(Registry, SimpleNamespace(specs=lambda kind: ())))
    found._sinks = [(f"odd{number}", cast(MetricSink, sink)) for number, sink in enumerate(sinks)]
    return found


def test_a_metric_sink_that_exits_ends_no_server(caplog: pytest.LogCaptureFixture) -> None:
    """Every second the log says so in a line; the traceback is there once."""

    def leave(*_: object) -> None:
        sys.exit(3)

    sinks = sinks_of(SimpleNamespace(snapshot=leave, server=leave))
    for _ in range(3):
        sinks.snapshot(Load())
    assert [bool(record.exc_info) for record in caplog.records] == [True] + [False] * 5
    assert caplog.records[-1].getMessage() == "the metric sink of plugin 'odd0' failed: SystemExit: 3"


def test_a_metric_sink_that_writes_into_figures_writes_into_its_own() -> None:
    def write(figures: dict[str, float]) -> None:
        figures["kv_live"] = 5.0

    seen: list[float] = []
    reads = SimpleNamespace(snapshot=lambda figures: seen.append(figures["kv_live"]), server=lambda _: None)
    sinks_of(SimpleNamespace(snapshot=write, server=lambda _: None), reads).snapshot(Load(kv_live=30))
    assert seen == [30.0]


@pytest.mark.parametrize("page", [5, "page", ("text/plain", "page"), (b"text/plain", b"page"), ("text/plain",)])
def test_what_is_no_page_is_another_sinks(page: object) -> None:
    good = ("text/plain", b"figures")
    sinks = sinks_of(SimpleNamespace(page=lambda: page), SimpleNamespace(page=lambda: good))
    assert sinks.page() == good


class TestThroughputLog:
    def test_one_line_per_interval_in_which_something_ran(self) -> None:
        log = ThroughputLog(10, now=0)
        load = Load(steps=5, output_tokens=500, prompt_tokens=1000, cached_tokens=250, kv_live=30, kv_total=100)
        assert log.line(load, 5) is None
        assert log.line(load, 10) == (
            "50.0 tok/s out, 100.0 tok/s in (25 % cached), 0 running, 0 waiting, KV 30 % live, 0 % cached"
        )
        assert log.line(load, 15) is None
        assert log.line(load, 20) is None, "nothing ran"
