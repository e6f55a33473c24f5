"""Errors that people read: texts that never fail, suggestions, and what ends a process."""

from __future__ import annotations

import threading

import pytest
from llmcore.api.errors import (
    RequestError,
    StartupError,
    Stopped,
    did_you_mean,
    message_of,
    reraise_if_stopping,
    text_of,
)


class Unsayable(Exception):
    """An error of a plugin whose own text fails."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


def test_a_text_never_fails() -> None:
    assert message_of(Unsayable()) == "" and text_of(Unsayable()) == "Unsayable"
    assert message_of(ValueError("half \ud800")) == "half ?"
    assert text_of(KeyError("x")) == "KeyError: 'x'"


def test_a_name_that_resembles_known_ones_is_suggested() -> None:
    assert did_you_mean("fcsf", ["fcfs", "priority"]) == " Did you mean fcfs?"
    assert did_you_mean("radxi", ["radix", "radix2"]) == " Did you mean radix or radix2?"
    assert did_you_mean("x", ["fcfs"]) == ""


def test_a_stop_passes_and_a_plugins_failure_does_not() -> None:
    with pytest.raises(Stopped):
        reraise_if_stopping(Stopped())
    for failure in (ValueError(), SystemExit(), GeneratorExit()):
        reraise_if_stopping(failure)


def test_ctrl_c_ends_the_main_thread_alone() -> None:
    with pytest.raises(KeyboardInterrupt):
        reraise_if_stopping(KeyboardInterrupt())
    passed = []

    def survive() -> None:
        reraise_if_stopping(KeyboardInterrupt())
        passed.append(True)

    thread = threading.Thread(target=survive)
    thread.start()
    thread.join()
    assert passed == [True]


def test_errors_keep_their_parts() -> None:
    error = RequestError("too long", param="prompt", code="context_length_exceeded")
    assert (str(error), error.param, error.status, error.retry_after) == ("too long", "prompt", 400, 1)
    started = StartupError("it ended", log="/x.log")
    assert (str(started), started.message, started.log) == ("it ended (log: /x.log)", "it ended", "/x.log")
