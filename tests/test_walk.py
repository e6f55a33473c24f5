"""docs/walk.md is what a run of the server writes, and the walk does not get longer."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from trace_walk import PAGE, Section, Stop, Trace, calls_of, docstrings, first_sentence, leaves, page, trace

MOST_FILES = 52
"""Files that a streamed chat enters in worker and engine, beside the model's own."""


@pytest.fixture(scope="module")
def traced() -> Trace:
    """The walk of one chat, on a server of its own."""
    return trace()


def test_the_page_is_what_the_run_writes(traced: Trace) -> None:
    assert PAGE.read_text() == page(traced), "docs/walk.md is out of date; run make docs"


def test_the_walk_does_not_get_longer(traced: Trace) -> None:
    claimed = re.search(r"\*\*(\d+) files\*\*", PAGE.read_text())
    assert claimed is not None
    assert len(traced.files()) <= int(claimed[1]) <= MOST_FILES, "\n".join(traced.files())


def test_worker_and_engine_are_both_in_it(traced: Trace) -> None:
    threads = set().union(*(where for functions in traced.functions.values() for where in functions.values()))
    assert {"worker MainThread", "worker hub", "engine MainThread"} < threads
    assert any(name.startswith("worker waitress-") for name in threads)
    assert "core/llmcore/builtin/cpu/sample.py" in traced.files(of_the_model=True)


# --- the rules, on a recording of a few lines


def recording(*lines: tuple[str, str, dict[str, Any]]) -> Trace:
    """A recording of one thread of the engine: (event, function, types), a second apart."""

    def entries() -> Iterator[dict[str, Any]]:
        for at, (event, function, types) in enumerate(lines):
            place = {"file": f"core/llmcore/{function[0]}.py", "process": "engine", "thread": "MainThread"}
            yield {"event": event, "function": function, "at": float(at), **place, **types}

    return Trace(entries())


TWICE = recording(
    ("run", "a", {}),
    ("call", "a", {"arrives": {"self": "A", "x": "None"}}),
    ("return", "a", {"leaves": "None"}),
    ("run", "b", {}),
    ("call", "b", {"arrives": {"y": "int"}}),
    ("call", "a", {"arrives": {"self": "A", "x": "Submit"}}),
    ("return", "a", {"leaves": "Request"}),
    ("return", "b", {"leaves": "str"}),
)
"""An idle turn of `a`; then `b`, which calls `a`."""


def section(*stops: Stop) -> Section:
    """A section of the engine's main thread."""
    return Section("", "", "engine", "MainThread", stops)


def test_a_stop_is_the_first_call_after_the_stop_before_it() -> None:
    calls = calls_of(section(Stop("b"), Stop("a")), TWICE, 0.0)
    assert [(call.function, call.at, call.leaves) for call in calls] == [("b", 4.0, "str"), ("a", 5.0, "Request")]
    assert leaves(Stop("b", leaves="a(x)"), calls[0], TWICE) == "`x: Submit` → `a`"
    assert TWICE.files() == ["core/llmcore/a.py", "core/llmcore/b.py"]


@pytest.mark.parametrize(
    ("stops", "says"),
    [
        ((Stop("c"),), "does not reach c at all"),
        ((Stop("b"), Stop("a"), Stop("b")), "does not reach b after the stop before it"),
    ],
)
def test_a_stop_that_is_not_reached_is_an_error(stops: tuple[Stop, ...], says: str) -> None:
    with pytest.raises(LookupError, match=says):
        calls_of(section(*stops), TWICE, 0.0)


def test_an_argument_that_is_not_there_is_an_error() -> None:
    with pytest.raises(LookupError, match="a takes no argument z"):
        TWICE.find("a", "engine", "Main*", 0.0).argument("z")


def test_a_name_that_two_files_have_is_an_error() -> None:
    both = Trace(
        {"event": "call", "file": file, "function": "f", "process": "engine", "thread": "t", "at": 0.0, "arrives": {}}
        for file in ("core/llmcore/a.py", "core/llmcore/b.py")
    )
    with pytest.raises(LookupError, match="several files"):
        both.find("f", "engine", "t", 0.0)


def test_docstrings_are_read_from_the_source() -> None:
    found = docstrings("scripts/trace_walk.py")
    assert found["Trace.files"].startswith("Returns the files")
    assert first_sentence("Cut a text.\nMore of it.") == "Cut a text."
