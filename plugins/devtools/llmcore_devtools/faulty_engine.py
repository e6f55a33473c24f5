"""Faults in the engine: those of the fake model's steps, and the engine's parts of the plugin `faults`."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from llmcore.api.processors import ProcessorContext, words_of
from llmcore.api.protocols import Device, Int32, Int64, KVManager
from llmcore.api.specs import OpContext
from llmcore.layers.sampling import Sampled, Sampler, SampleRows
from llmcore.registry.loader import load
from torch import Tensor

from llmcore_devtools.faults import LATER, SLOW_SECONDS, TOKENS, Panic

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

        `tokens`, `positions` and `row` [N] are the rows' content. Returns None without faults of this kind.
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


_BUILTIN = "llmcore.builtin"
_PLACES = ("make", "start", "mask", "accept", "finished", "never")
_WAYS = ("raise", "slow", "hang", "none")


def make_device(index: int) -> Device:
    """The CPU device, for which `DeviceFault` is the end."""
    cpu: type = load(f"{_BUILTIN}.devices.cpu:CPU")
    faulty: Device = type("FaultyCPU", (cpu,), {"sticky": lambda self, error: isinstance(error, DeviceFault)})()
    return faulty


def make_sampler(context: OpContext) -> Sampler:
    """The CPU's sampler, which fails on rows that the fake model has marked."""
    sample: Sampler = load(f"{_BUILTIN}.cpu.sample:make")(context)

    def faulty(logits: Tensor, rows: SampleRows) -> Sampled:
        first = logits[:, 0]
        if bool((first == SAMPLE_MARK).any()):
            raise Panic("the sampler was told to fail")
        drawn = sample(logits, rows)
        return replace(drawn, tokens=drawn.tokens.masked_fill(first == ILLEGAL_MARK, logits.shape[1] + 7))

    return faulty


class FaultyManager:
    """The radix cache, which raises on prompts that hold the token of its fault."""

    def __init__(self, granule: int) -> None:
        self._manager: KVManager = load(f"{_BUILTIN}.radix:RadixCache")(granule)
        self.caching = self._manager.caching
        self.insert = self._manager.insert
        self.remove = self._manager.remove
        self.evict = self._manager.evict
        self.stats = self._manager.stats

    def match(self, salt: bytes, content: Int64) -> Int32:
        """KVManager."""
        if (content == TOKENS["cache"]).any():
            raise Panic("the prefix cache was told to fail")
        return self._manager.match(salt, content)


class FaultyProcessor:
    """A processors.MaskProcessor that allows every token, and fails as `args` demand.

    `at`: the call that fails ("make", "start", "mask", "accept", "finished", "never"). `how`: "raise"; "slow", which
    takes `seconds`; "hang", which never returns; "none", with which "mask" allows no token. `after`: accepted tokens
    before it fails.
    """

    def __init__(self, args: Mapping[str, Any], vocab_size: int) -> None:
        self._args = args
        self._vocab_size = vocab_size
        self._accepted = 0

    def accept(self, token: int) -> None:
        """HostProcessor."""
        self._at("accept")
        self._accepted += 1

    def finished(self) -> bool:
        """HostProcessor."""
        self._at("finished")
        return False

    def mask(self) -> Int32 | None:
        """MaskProcessor."""
        due = self._at("mask")
        return np.zeros(words_of(self._vocab_size), np.int32) if due and self._args.get("how") == "none" else None

    def _at(self, place: str) -> bool:
        due: bool = self._args.get("at") == place and self._accepted >= self._args.get("after", 0)
        if due:
            _fail(self._args)
        return due


def make_manager(granule: int) -> FaultyManager:
    """KVManagerSpec.make."""
    return FaultyManager(granule)


def make_processor(args: Mapping[str, Any], context: ProcessorContext) -> Callable[[Int32], FaultyProcessor]:
    """LogitsProcessorSpec.make."""
    for name, known in (("at", _PLACES), ("how", _WAYS)):
        if name in args and args[name] not in known:
            raise ValueError(f"{name} is one of {', '.join(known)}")
    if args.get("at") == "make":
        _fail(args)

    def start(prompt: Int32) -> FaultyProcessor:
        if args.get("at") == "start":
            _fail(args)
        return FaultyProcessor(args, context.vocab_size)

    return start


def _fail(args: Mapping[str, Any]) -> None:
    match args.get("how", "raise"):
        case "raise":
            raise RuntimeError("the logits processor was told to fail")
        case "slow":
            time.sleep(args.get("seconds", SLOW_SECONDS))
        case "hang":
            time.sleep(1 << 20)
