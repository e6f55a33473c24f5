"""Grammars compiled, within limits of time, memory and stack, and kept."""

from __future__ import annotations

import atexit
import hashlib
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llmcore.api import RequestError

COMPILE_SECONDS = 0.8
"""Of a processor, which a grammar may take to compile."""

PATIENCE_SECONDS = 5.0
"""How long that may last where others have the processors."""

MOST_COMPILING = 4
"""Grammars that are compiled at once, those included that were given up: their threads go on until they are done."""

EXIT_SECONDS = 5.0
"""How long Python waits for them when it exits: it ends threads wherever they are, and within the library that is a
crash."""

KEPT = 256
KEPT_CHARACTERS = 16 << 20
"""How many compiled grammars are kept, and how long their texts may be in all."""

CHEAP_SECONDS = 0.02
"""What compiles faster is compiled for every request. Copies of a matcher share its lexer: behind a lock, so that
their masks are computed one after another, and with one limit of states for all of them."""

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


TRIED_TOKENS, TRIED_SECONDS = 16, 0.1
"""How far two answers are followed when a grammar is compiled: a limit that most would meet is better known then."""

_TOO_MANY = re.compile(r"items; max is|too many items", re.IGNORECASE)
_LIMIT = re.compile(r"max is|limit|fuel|too (many|big|large|complex)", re.IGNORECASE)
"""What llguidance says where one of the limits was met; it has no codes."""


@dataclass(frozen=True)
class Compiled:
    """A matcher at its grammar's begin, the seconds it took and the characters of its text."""

    matcher: LLMatcher
    seconds: float
    size: int


class Compiler:
    """Matchers by their grammars' text, all for one vocabulary. May be used from any thread."""

    def __init__(self, tokens: LLTokenizer) -> None:
        self._tokens = tokens
        self._kept: OrderedDict[bytes, Compiled] = OrderedDict()
        self._characters = 0
        self._lock = threading.Lock()
        self._places = threading.Semaphore(MOST_COMPILING)

    def matcher(self, text: str) -> LLMatcher:
        """At the grammar's begin, the caller's own. Raises ValueError that says what is wrong with it."""
        key = hashlib.sha256(text.encode()).digest()
        with self._lock:
            kept = self._kept.get(key)
            if kept is not None:
                self._kept.move_to_end(key)
        if kept is None:
            kept = self._first(key, text)
        elif kept.seconds < CHEAP_SECONDS:
            return _checked(_within(COMPILE_SECONDS, lambda: compiled_again(text, self._tokens))).matcher
        return kept.matcher.deep_copy()

    def _first(self, key: bytes, text: str) -> Compiled:
        if not self._places.acquire(timeout=COMPILE_SECONDS):
            text = "too many other grammars are being compiled; send the request again"
            raise RequestError(text, code="server_overloaded", status=503)
        made = _checked(_within(COMPILE_SECONDS, lambda: compiled(text, self._tokens), self._places.release))
        with self._lock:
            self._keep(key, made)
        return made

    def _keep(self, key: bytes, kept: Compiled) -> None:
        if key not in self._kept:
            self._kept[key] = kept
            self._characters += kept.size
        while len(self._kept) > KEPT or (self._characters > KEPT_CHARACTERS and len(self._kept) > 1):
            self._characters -= self._kept.popitem(last=False)[1].size


def _checked(made: Compiled | str) -> Compiled:
    if isinstance(made, str):
        raise ValueError(made)
    return made


def compiled_again(text: str, tokens: LLTokenizer) -> Compiled | str:
    """As `compiled`, for a text that is known to be right."""
    began = time.thread_time()
    matcher = LLMatcher(tokens, text, limits=LIMITS, log_level=0)
    seconds = time.thread_time() - began
    return message_of(matcher) if matcher.is_error() else Compiled(matcher, seconds, len(text))


def compiled(text: str, tokens: LLTokenizer) -> Compiled | str:
    """A matcher, or why there is none: also where no token can come first, or a limit is met soon after."""
    made = compiled_again(text, tokens)
    if isinstance(made, str):
        return made
    until = time.monotonic() + TRIED_SECONDS
    for which in (0, -1):  # short tokens have low numbers in most vocabularies, and long ones high numbers
        wrong = _try(made.matcher.deep_copy(), which, until)
        if wrong is not None:
            return wrong
    return made


def _try(matcher: LLMatcher, which: int, until: float) -> str | None:
    """What is wrong on the way of the first or the last token that may come, again and again; None: nothing."""
    for n in range(TRIED_TOKENS):
        allowed = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        words = np.flatnonzero(allowed)
        if matcher.is_error():
            return message_of(matcher)
        if not words.size:
            return "nothing fits it" if n == 0 else None
        word = int(words[which])
        bits = np.flatnonzero(np.unpackbits(allowed[word : word + 1], bitorder="little"))
        matcher.consume_token(word * 8 + int(bits[which]))
        if matcher.is_error():
            return message_of(matcher)
        if matcher.is_stopped() or time.monotonic() > until:
            break
    return None


def message_of(matcher: LLMatcher) -> str:
    """What is wrong, in a line or two."""
    text = matcher.get_error().replace("<non-verbose/>", "")
    if text.strip() in ("NoExtension", "NoExtensionBias"):
        return "nothing fits it"
    if _TOO_MANY.search(text):
        return (
            f"more than {LIMITS.max_items_in_row:,} ways to go on are possible at one point; have fewer alternatives "
            "there, or join them in one regular expression, enum of texts or terminal (a rule in capitals)"
        )
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return " ".join(lines)[:300] or "it cannot be compiled"


def failure_of(matcher: LLMatcher) -> Exception:
    """What ended `matcher` in the middle of an answer: a limit, which the client can stay below, or a mistake."""
    said = message_of(matcher)
    if _LIMIT.search(matcher.get_error()):
        return RequestError(f"in the middle of an answer: {said}", code="invalid_value")
    return RuntimeError(said)


def _within(seconds: float, work: Callable[[], Any], after: Callable[[], object] = bool) -> Any:
    """What `work` returns on a thread with a deep stack, or a text that says that it takes too long. `after`: called
    when `work` has ended, however late."""
    result: list[Any] = []
    clock: list[int] = []

    def run() -> None:
        try:
            clock.append(time.pthread_getcpuclockid(threading.get_ident()))
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
    _STARTED.add(thread)
    until = time.monotonic() + PATIENCE_SECONDS
    thread.join(seconds)
    while thread.is_alive() and time.monotonic() < until and (left := seconds - _spent(clock)) > 0:
        thread.join(max(left, 0.01))
    return result[0] if result else f"it takes longer than {seconds:g} s to compile"


def _spent(clock: list[int]) -> float:
    """Seconds of a processor that the thread with this clock has had, which may not have begun, or may have ended."""
    try:
        return time.clock_gettime(clock[0]) if clock else 0.0
    except OSError:
        return 0.0


@atexit.register
def _settle() -> None:
    until = time.monotonic() + EXIT_SECONDS
    for thread in list(_STARTED):
        thread.join(max(0.0, until - time.monotonic()))


_STARTED: WeakSet[threading.Thread] = WeakSet()
_STARTING = threading.Lock()
