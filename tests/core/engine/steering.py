"""A plugin: logits processors for tests. Each notes what it was told in `TOLD`, by the tag that its request gave."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from llmcore.api import LogitsProcessorSpec, ProcessorContext, RequestError, hookimpl, words_of
from llmcore.api.sched import Int32

TOLD: dict[str, list[list[int]]] = {}
"""Tag -> tokens accepted, per choice."""

CALLS: dict[str, Callable[[], object]] = {}
"""What a test has called, by the name that a request gives: while a processor is made, or before each of its masks."""


@hookimpl
def register_logits_processors() -> Iterable[LogitsProcessorSpec]:
    """One of each kind."""
    yield LogitsProcessorSpec(name="lists", make=f"{__name__}:lists", example={"lists": [[1, 2]]})
    yield LogitsProcessorSpec(name="even", make=f"{__name__}:even")
    yield LogitsProcessorSpec(name="push", make=f"{__name__}:push", kind="bias", example={"token": 3})
    yield LogitsProcessorSpec(name="device", make=f"{__name__}:on_device", kind="device", example={"ban": [1]})


def _check(args: dict[str, Any], known: set[str]) -> None:
    if unknown := set(args) - known:
        raise ValueError(f"there is no argument {min(unknown)}")


class Listed:
    """Allows `lists[i]` for token i, the last list from there on; forbids them where `forbid` is set."""

    def __init__(self, args: dict[str, Any], prompt: Int32, vocab: int) -> None:
        self.args, self.prompt, self.vocab = args, prompt, vocab
        self.told: list[int] = []
        TOLD.setdefault(args.get("tag", ""), []).append(self.told)

    def accept(self, token: int) -> None:
        if len(self.told) == self.args.get("raise_at"):
            raise RuntimeError("told to raise in accept")
        self.told.append(token)

    def finished(self) -> bool:
        return len(self.told) == self.args.get("finish_at")

    def mask(self) -> Int32:
        CALLS.get(self.args.get("calls", ""), bool)()
        if len(self.told) == self.args.get("raise_mask_at"):
            raise RuntimeError("told to raise in mask")
        lists = self.args["lists"]
        listed = np.zeros(words_of(self.vocab) * 32, np.bool_)
        listed[lists[min(len(self.told), len(lists) - 1)]] = True
        allowed = ~listed if self.args.get("forbid") else listed
        return np.packbits(allowed, bitorder="little").view(np.int32)


def lists(args: dict[str, Any], context: ProcessorContext) -> Any:
    """The listed tokens only, or all others."""
    CALLS.get(args.get("make_calls", ""), bool)()
    _check(
        args, {"make_calls", "calls", "lists", "forbid", "tag", "raise_at", "raise_mask_at", "finish_at", "refusal"}
    )
    if args.get("refusal"):
        raise RequestError("not now", code=args["refusal"])
    return lambda prompt: Listed(args, prompt, context.vocab_size)


def even(args: dict[str, Any], context: ProcessorContext) -> Any:
    """Even tokens only."""
    _check(args, {"start_fails"})

    def start(prompt: Int32) -> Listed:
        if args.get("start_fails"):
            raise RuntimeError("told to raise in start")
        return Listed({"lists": [list(range(0, context.vocab_size, 2))]}, prompt, context.vocab_size)

    return start


class Push:
    """Adds 1000 to one token, minus infinity to another, at every other position."""

    def __init__(self, token: int, ban: int, value: float) -> None:
        self.token, self.ban, self.value, self.told = token, ban, value, 0

    def accept(self, token: int) -> None:
        self.told += 1

    def finished(self) -> bool:
        return False

    def bias(self) -> dict[int, float]:
        return {self.ban: float("-inf")} if self.told % 2 else {self.token: self.value}


def push(args: dict[str, Any], context: ProcessorContext) -> Any:
    """See Push."""
    _check(args, {"token", "ban", "value"})
    return lambda prompt: Push(args["token"], args.get("ban", 0), float(args.get("value", 1000.0)))


def on_device(args: dict[str, Any], context: ProcessorContext) -> Any:
    """Forbids `ban` and the last known token; `fault`: "raise", "nan" or "short"."""
    _check(args, {"ban", "fault"})
    ban = torch.tensor(args["ban"], dtype=torch.int64)

    def process(logits: torch.Tensor, ids: torch.Tensor, length: torch.Tensor) -> torch.Tensor:
        if args.get("fault") == "raise":
            raise RuntimeError("told to raise on the device")
        scores = logits.index_fill(0, ban, -torch.inf)
        scores = scores.index_fill(0, ids[length.long() - 1].long().reshape(1), -torch.inf)
        if args.get("fault") == "nan":
            scores = scores * torch.nan
        return scores[:-1] if args.get("fault") == "short" else scores

    return lambda prompt: process
