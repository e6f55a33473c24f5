"""The logits processors that are bound to one choice, and what they want for its next token. No torch.

The engine's thread tells tokens (`accept`) and asks whether the answer is there (`ready`); another computes it
(`prepare`). The two alternate: nothing is told while an answer is being computed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from llmcore.api.counters import TALLIES
from llmcore.api.errors import RequestError, message_of, reraise_if_stopping, text_of
from llmcore.api.processors import OVERLOADED, words_of
from llmcore.api.protocols import Int32

PATIENT = 3
"""Late answers in a row after which a choice is left out of plans until the next one is there."""


MOST_SECONDS = 10.0
"""The longest time that an answer may take."""

Reason = tuple[str, str]
"""Why a request ends with an error: (code, message)."""

CLIENTS_FAULT, _MISTAKE = "invalid_value", "internal_error"
"""Codes of what ends a choice: the request asked for what cannot be done, or a processor is broken."""


class ChoiceProcessors:
    """One choice's processors: `hosts` as (name, kind, processor), `devices` as (name, callable).

    `run` gets a function and calls it, now or on another thread. `mask`, `bias`: valid while `ready`. `error`: why the
    choice must end, as (code, message), None if nothing is wrong; `cause`: what was raised, where that is a mistake.
    `late`: answers in a row that came too late.
    `dropped`: the choice has ended.
    `free`: they allow everything from now on.
    `produced`: tokens that the choice has already; the processors are told of them first.
    `banned`: ids that the request forbids while its answer is short; `must_end`: `mask` allows nothing else. `fields`:
    by processor the client's field that asked for it.
    """

    def __init__(
        self,
        hosts: Sequence[tuple[str, str, Any]],
        devices: Sequence[tuple[str, Any]],
        vocab_size: int,
        run: Callable[[Callable[[], None]], None],
        banned: Sequence[int] = (),
        fields: Mapping[str, str] | None = None,
        produced: Sequence[int] = (),
    ) -> None:
        self.hosts = hosts
        self.devices = devices
        self.mask: Int32 | None = None
        self.bias: dict[int, float] = {}
        self.error: tuple[str, str] | None = None
        self.cause: BaseException | None = None
        self.late = 0
        self.dropped = False
        self.free = False
        self.must_end = False
        self._vocab_size = vocab_size
        self._others = None if not banned else ~mask_of(banned, vocab_size)
        self._run = run
        self._fields = fields or {}
        self._ready = threading.Event()
        self._ready.set()
        self._asked = hosts[0][0] if hosts else ""
        for token in produced:
            self._tell(token)
        self._start()

    @property
    def ready(self) -> bool:
        """True if `mask` and `bias` are those of the next token, or `error` is set."""
        return self._ready.is_set()

    @property
    def held(self) -> bool:
        """True if the choice should be in no step now."""
        return self.late >= PATIENT and not self.ready

    def overdue(self, now: float) -> bool:
        """True if the answer takes too long; then `error` says so. `now` is time.monotonic()."""
        if self.ready or now - self._since < MOST_SECONDS:
            return False
        self.error = _MISTAKE, f"logits processor {self._asked!r} gave no answer within {MOST_SECONDS:g} s"
        return True

    def wait(self, seconds: float) -> bool:
        """`ready`, after waiting for it up to `seconds`."""
        return self._ready.wait(seconds)

    def accept(self, token: int) -> bool:
        """Tell every host processor of a token that was read; whether one of them is finished. See `error`."""
        finished = self._tell(token)
        if not finished:
            self._start()
        return finished

    def _tell(self, token: int) -> bool:
        finished, free = False, not self.devices
        if self.free or self.error:
            return False
        for name, _, processor in self.hosts:
            try:
                processor.accept(token)
                finished = bool(processor.finished()) or finished
                free = free and bool(getattr(processor, "free", bool)())
            except BaseException as error:  # noqa: BLE001 - whatever it raises ends its choice only
                reraise_if_stopping(error)
                self.fail(name, error)
                return False
        self.late = 0
        self.free = free
        if free:
            self.mask, self.bias = None, {}
        return finished

    def _start(self) -> None:
        """Have the next token's answer computed, if there is anything to ask."""
        if self.hosts and not self.free and self.error is None:
            self._since = time.monotonic()
            self._ready.clear()
            self._run(self._prepare)

    def _prepare(self) -> None:
        """Compute what the next token needs."""
        mask: Int32 | None = None
        bias: dict[int, float] = {}
        try:
            for name, kind, processor in () if self.dropped else self.hosts:
                self._asked = name
                if kind == "mask":
                    more = self._checked_mask(processor.mask())
                    mask = mask if more is None else both_masks(more, mask)
                else:
                    self._add(bias, processor.bias())
            if mask is not None and not _allows(mask):
                raise ValueError("its mask allows no token")
            self.must_end = mask is not None and self._others is not None and not (mask & self._others).any()
            self.mask, self.bias = mask, bias
        except BaseException as error:  # noqa: BLE001 - whatever it raises ends its choice only
            reraise_if_stopping(error)
            self.fail(self._asked, error)
        self._ready.set()

    def _checked_mask(self, mask: Any) -> Int32 | None:
        if mask is None:
            return None
        count = words_of(self._vocab_size)
        words = np.asarray(mask)
        if words.shape != (count,) or words.dtype not in (np.int32, np.uint32):
            raise ValueError(f"its mask is {words.dtype} {list(words.shape)}, needs int32 [{count}]")
        words = words.view(np.int32)
        tail = self._vocab_size % 32
        if tail and int(words[-1]) & -1 << tail:
            # bits behind the vocabulary stand for nothing
            words = words.copy()
            words[-1] &= np.int32((1 << tail) - 1)
        return words

    def _add(self, bias: dict[int, float], more: Any) -> None:
        for token, value in more.items():
            if not 0 <= token < self._vocab_size:
                raise ValueError(f"its bias names token {token}, outside 0 to {self._vocab_size - 1}")
            if not value < float("inf"):
                raise ValueError(f"its bias of token {token} is {value}")
            bias[int(token)] = bias.get(token, 0.0) + float(value)

    def fail(self, name: str, error: BaseException) -> Reason:
        """Processor `name` raised: `error` for the client."""
        if isinstance(error, RequestError):
            code = OVERLOADED if error.code == OVERLOADED else CLIENTS_FAULT
            self.error = code, f"{self._fields.get(name, name)}: {message_of(error)}"[:500]
        else:
            TALLIES.count("plugin_failures", name, "logits_processor")
            self.cause = error
            self.error = _MISTAKE, f"logits processor {name!r} failed: {text_of(error)}"[:500]
        self._ready.set()
        return self.error


Steered = tuple[int, ChoiceProcessors]
"""A late sample's number among a step's samples, and its logits processors."""


def _allows(mask: Int32) -> bool:
    """True if any bit is set. numpy's `any` releases the GIL, and taking it again among several threads costs more
    than the comparison: 32 masks of 19 KB took 3 ms of CPU instead of 1."""
    return mask.tobytes() != bytes(mask.nbytes)


def mask_of(ids: Sequence[int], vocab_size: int) -> Int32:
    """A mask that allows these tokens, as far as they are of the vocabulary."""
    allowed = np.zeros(words_of(vocab_size) * 32, np.bool_)
    allowed[[token for token in ids if token < vocab_size]] = True
    return np.packbits(allowed, bitorder="little").view("<i4").astype(np.int32)


def both_masks(first: Int32, second: Int32 | None) -> Int32:
    """The tokens that both masks allow; None allows everything."""
    if second is None:
        return first
    both: Int32 = first & second
    return both
