"""The parts of the plugin `faults` that run in the engine."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from llmcore.api.processors import ProcessorContext, words_of
from llmcore.api.protocols import Device, Int32, Int64, KVManager
from llmcore.api.specs import OpContext
from llmcore.layers.sampling import Sampled, Sampler, SampleRows
from llmcore.registry.loader import load
from torch import Tensor

from llmcore_devtools.fault_names import SLOW_SECONDS, Panic
from llmcore_devtools.fault_steps import ILLEGAL_MARK, SAMPLE_MARK, DeviceFault
from llmcore_devtools.faults import TOKENS

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
