"""Faults that the fake model causes in a step with their tokens."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from llmcore_devtools.fault_names import LATER, SLOW_SECONDS

SAMPLE_MARK, ILLEGAL_MARK = 3.0e8, 6.0e8
"""Scores of the first token that mark a row on which the sampling kernel `faults` must fail."""

_MARKS = {"sample": SAMPLE_MARK, "illegal": ILLEGAL_MARK}
_ECHO = 1000
"""A hidden state below minus this encodes a token to answer with; a negative one above it, the number of a mark."""


class DeviceFault(RuntimeError):
    """The error that is sticky on the device `faults`."""


class StepFaults:
    """The faults of one model.

    `tokens`: name -> id. LATER tokens after the token of `later:NAME`, the answer is the token of `NAME`. `answers`:
    ids below it may be the answer of a row without faults.
    """

    def __init__(self, tokens: Mapping[str, int], answers: int) -> None:
        self._tokens = tokens
        self._never = [token for token in tokens.values() if token >= answers]
        self._tried: set[str] = set()
        self._later = {
            token: tokens[name.removeprefix("later:")] for name, token in tokens.items() if name.startswith("later:")
        }
        self._raises: Mapping[str, Callable[[], None]] = {
            "forward": lambda: _raise(RuntimeError("the fake model was told to fail")),
            "forward_once": lambda: self._once("forward_once", RuntimeError("the fake model was told to fail once")),
            "oom": lambda: _raise(torch.OutOfMemoryError("the fake model was told that there is no memory")),
            "oom_once": lambda: self._once("oom_once", torch.OutOfMemoryError("no memory, as it was told, once")),
            "device": lambda: _raise(DeviceFault("the fake device was told to fail for good")),
            "slow": lambda: time.sleep(SLOW_SECONDS),
            "hang": lambda: time.sleep(1 << 20),
            "exit": lambda: os._exit(70),
        }

    def before(self, tokens: Tensor) -> None:
        """Cause the faults of the whole step that computes `tokens` [T]."""
        for name, act in self._raises.items():
            if name in self._tokens and bool((tokens == self._tokens[name]).any()):
                act()

    def mark(self, hidden: Tensor, tokens: Tensor) -> None:
        """Mark the hidden states [T, 5] of rows that must fail alone."""
        if "nan" in self._tokens:
            hidden[tokens == self._tokens["nan"]] = torch.nan
        for number, name in enumerate(_MARKS, 1):
            if name in self._tokens:
                hidden[tokens == self._tokens[name]] = -number

    def echo(self, tokens: Tensor, positions: Tensor, row: Tensor, length: Tensor) -> Tensor | None:
        """[R] the token that each row of `length` [R] tokens must answer with next; below 0 for any token.

        `tokens`, `positions` and `row` [N] are the rows' content. Returns None if there are no faults of this kind.
        """
        if not self._later:
            return None
        due = torch.full_like(length, -1)
        for token, answer in self._later.items():
            at = (tokens == token) & (positions + LATER == length[row])
            due[row[at]] = answer
        return due

    def scores(self, scores: Tensor, hidden: Tensor) -> None:
        """Change the scores [S, V] of rows as their hidden states [S, 5] demand. Other rows draw no fault's token."""
        scores[:, self._never] = -1e4
        sign = hidden[:, 0]
        for number, mark in enumerate(_MARKS.values(), 1):
            scores[sign == -number, 0] = mark
        echoed = sign < -_ECHO
        scores[echoed] = -1e4
        scores[echoed, (-sign[echoed] - _ECHO).long()] = 11.0

    def _once(self, name: str, error: Exception) -> None:
        """Raise `error`, unless the last call with `name` raised."""
        if name in self._tried:
            self._tried.discard(name)
            return
        self._tried.add(name)
        raise error


def echoing(token: Tensor) -> Tensor:
    """The hidden states' values that mean: answer with `token`."""
    return -(token + _ECHO).float()


def _raise(error: Exception) -> None:
    raise error
