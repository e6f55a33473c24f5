"""Grammars compiled, within limits of time, memory and stack, and kept."""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

COMPILE_SECONDS = 0.8
MOST_COMPILING = 4
"""Grammars that are compiled at once, those included that were given up: their threads go on until they are done."""

KEPT = 256
KEPT_CHARACTERS = 16 << 20
"""How many compiled grammars are kept, and how long their texts may be in all."""

_STACK_BYTES = 256 << 20
"""llguidance recurses through chains of rules, 3 KB a rule; only what is touched of the stack becomes memory."""

LIMITS = LLParserLimits(
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=200_000,
    step_max_items=50_000,
    max_items_in_row=2_000,
    max_lexer_states=20_000,
    max_grammar_size=200_000,
    verbose_errors=False,
)
"""A state of the lexer takes one or two KB, so a choice at most some 40 MB; a mask takes some 20 ms at most."""


class Compiler:
    """Matchers by their grammars' text, all for one vocabulary. May be used from any thread."""

    def __init__(self, tokens: LLTokenizer) -> None:
        self._tokens = tokens
        self._kept: OrderedDict[bytes, tuple[LLMatcher, int]] = OrderedDict()
        self._characters = 0
        self._lock = threading.Lock()
        self._places = threading.Semaphore(MOST_COMPILING)

    def matcher(self, text: str) -> LLMatcher:
        """At the grammar's begin; copy it, do not move it. Raises ValueError that says what is wrong with it."""
        key = hashlib.sha256(text.encode()).digest()
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key][0]
        if not self._places.acquire(timeout=COMPILE_SECONDS):
            raise ValueError("too many other grammars are being compiled; send the request again")
        made: LLMatcher | str = _within(COMPILE_SECONDS, lambda: compiled(text, self._tokens), self._places.release)
        if isinstance(made, str):
            raise ValueError(made)
        with self._lock:
            self._keep(key, made, len(text))
        return made

    def _keep(self, key: bytes, matcher: LLMatcher, size: int) -> None:
        if key not in self._kept:
            self._kept[key] = matcher, size
            self._characters += size
        while len(self._kept) > KEPT or (self._characters > KEPT_CHARACTERS and len(self._kept) > 1):
            _, (_, gone) = self._kept.popitem(last=False)
            self._characters -= gone


def compiled(text: str, tokens: LLTokenizer) -> LLMatcher | str:
    """A matcher, or why there is none: also where no token can come first."""
    matcher = LLMatcher(tokens, text, limits=LIMITS, log_level=0)
    if matcher.is_error():
        return message_of(matcher)
    first = matcher.deep_copy()
    allowed = np.frombuffer(first.compute_bitmask(), np.uint8)
    if first.is_error():
        return message_of(first)
    return matcher if allowed.any() else "nothing fits it"


def message_of(matcher: LLMatcher) -> str:
    """What is wrong, in a line or two."""
    text = matcher.get_error().replace("<non-verbose/>", "")
    if text.strip() in ("NoExtension", "NoExtensionBias"):
        return "nothing fits it"
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return " ".join(lines)[:300] or "it cannot be compiled"


def _within(seconds: float, work: Callable[[], Any], after: Callable[[], object]) -> Any:
    """What `work` returns on a thread with a deep stack, or a text that says that it takes too long. `after`: called
    when `work` has ended, however late."""
    result: list[Any] = []

    def run() -> None:
        try:
            result.append(work())
        except BaseException as error:  # noqa: BLE001 - a panic of the library is no Exception
            result.append(f"it cannot be compiled: {type(error).__name__}")
        finally:
            after()

    thread = threading.Thread(target=run, name="guided-compile", daemon=True)
    with _STARTING:
        before = threading.stack_size(_STACK_BYTES)
        try:
            thread.start()
        finally:
            threading.stack_size(before)
    thread.join(seconds)
    return result[0] if result else f"it takes longer than {seconds:g} s to compile"


_STARTING = threading.Lock()
