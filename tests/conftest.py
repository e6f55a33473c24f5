"""For every suite."""

from __future__ import annotations

import gc
import signal
from collections.abc import Generator, Iterator

import pytest
from hypothesis import HealthCheck, Phase, settings

# The same examples in every run, and no opinion on how fast the machine is that makes them.
settings.register_profile(
    "steady", deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow]
)
# scripts/mutants.sh: a mutant that fails is killed, whatever its smallest example is, and most that fail at all fail
# early (see `tests.examples`).
settings.register_profile("mutants", settings.get_profile("steady"), phases=[Phase.explicit, Phase.generate])
settings.load_profile("steady")

for number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
    # Shells' `&` and nohup have this process ignore them, and then so would every server under test. A handler that
    # does nothing is not inherited.
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, lambda number, frame: None)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is imported and collected stays until the end: the collector of cycles never looks through it."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture
def nothing_in_advance(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines of this process start no child that tries grammars before a request brings one. Such a child costs more
    CPU time than most tests, and an engine that serves starts one at once."""
    from llmcore.engine.processors import Processors

    monkeypatch.setattr(Processors, "warm", lambda self: None)


@pytest.fixture(scope="module")
def forgotten() -> Iterator[None]:
    """The trees of source.py, once the rules have been looked after."""
    from source import parsed

    yield
    parsed.cache_clear()
