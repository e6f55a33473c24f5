"""Threads for plugins' code: what is said of calls that take long, and of which."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable

import pytest
from llmcore.api import LogitsProcessorSpec
from llmcore.api.processors import ProcessorContext
from llmcore.engine import processors
from llmcore.engine.processors import Processors, Threads


class Call:
    """A plugin's call that lasts until the test ends it."""

    def __init__(self) -> None:
        self._began, self._over = threading.Event(), threading.Event()
        self.thread: int | None = None

    def __call__(self, *given: object) -> None:
        self.thread = threading.get_ident()
        self._began.set()
        assert self._over.wait(60)

    def wait(self) -> None:
        """Until it is under way."""
        assert self._began.wait(60)

    def end(self) -> None:
        """Let it return."""
        self._over.set()


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Call:
    """Whose thread counts as lost at once."""
    monkeypatch.setattr(processors, "HUNG_SECONDS", 0.0)
    call = Call()
    request.addfinalizer(call.end)
    return call


def test_a_call_that_takes_long_is_told_of_and_replaced(call: Call, caplog: pytest.LogCaptureFixture) -> None:
    pool = Threads("test", 1)
    pool.run(call)
    call.wait()
    pool.tend()
    assert [record.getMessage() for record in caplog.records] == [
        "1 calls of plugins have taken more than 0 s; 1 more threads serve the others"
    ]
    other = Call()
    other.end()
    pool.run(other)
    other.wait()


def test_two_threads_serve_calls_that_are_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """More would spend their time on handing Python's lock to each other."""
    monkeypatch.setattr(processors, "WAITED_SECONDS", float("inf"))
    pool = Threads("test", 8)
    calls = [Call() for _ in range(40)]
    for call in calls:
        pool.run(call)
    calls[0].wait()
    calls[1].wait()
    for call in calls:
        call.wait()
        call.end()
    assert len({call.thread for call in calls}) == processors.QUICK


def test_where_calls_wait_all_threads_serve(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Those awake may be in calls that take long: whoever waits sees to it."""
    monkeypatch.setattr(processors, "WAITED_SECONDS", 0.0)
    pool = Threads("test", 4)
    calls = [Call() for _ in range(5)]
    for call in calls:
        request.addfinalizer(call.end)
        pool.run(call)
    for call in calls[:4]:
        pool.hurry()
        call.wait()
    assert calls[4].thread is None
    calls[0].end()
    calls[4].wait()


def test_what_is_made_ready_in_advance_may_take_long(
    call: Call, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """At the start of a server, when a vocabulary is read, nothing is late: no request waits for it."""
    known: dict[str, Callable[..., None]] = {"plugin:warm": call}
    monkeypatch.setattr(processors, "load", known.__getitem__)
    spec = LogitsProcessorSpec(name="x", make="plugin:make", warm="plugin:warm")
    made = Processors({"x": spec}, ProcessorContext(9, (0,), lambda: pytest.fail("nobody asks for it")))
    made.warm()
    call.wait()
    made.threads.tend()
    made.threads.tend()
    assert not caplog.records


def test_who_cannot_make_ready_is_told_of(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def warm(context: ProcessorContext) -> None:
        raise SystemExit("no such file")

    monkeypatch.setattr(processors, "load", lambda path: warm)
    spec = LogitsProcessorSpec(name="x", make="plugin:make", warm="plugin:warm")
    Processors({"x": spec}, ProcessorContext(9, (0,), lambda: pytest.fail("nobody asks for it"))).warm()
    for thread in threading.enumerate():
        if thread.name == "processors-warm":
            thread.join(60)
    assert [record.getMessage() for record in caplog.records] == ["logits processor x failed before the first request"]


AT_EXIT = """
import threading, time
from llmcore.engine.processors import Threads, apart

def call(name):
    began.set()
    time.sleep(0.3)
    print(name, "is over", flush=True)

began = threading.Event()
{start}
began.wait()
"""


@pytest.mark.parametrize("start", ["apart('it', lambda: call('it'))", "Threads('some', 2).run(lambda: call('it'))"])
def test_python_waits_at_its_exit_for_calls_under_way(start: str) -> None:
    """Or it would end their threads within a native library, which is a crash."""
    done = subprocess.run([sys.executable, "-c", AT_EXIT.format(start=start)], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "it is over\n", "")
