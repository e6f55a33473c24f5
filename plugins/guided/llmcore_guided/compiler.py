"""Compiles grammars within limits of time, memory and stack, and keeps the results.

Another process tries a new grammar first (`trials`): it translates and compiles the grammar and can be killed. If it
succeeds in time, llguidance alone compiles the grammar in this process and releases the GIL meanwhile.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from llmcore.api import RequestError

from llmcore_guided import limits
from llmcore_guided.grammars import TagRule, tags_of
from llmcore_guided.sayings import is_limit, said
from llmcore_guided.trials import Question, Trials

EXIT_SECONDS = 5.0
"""Seconds that Python's exit waits for a running compilation. Python ends threads wherever they are, and a thread that
ends inside the library crashes."""

KEPT = 256
KEPT_CHARACTERS = 16 << 20
"""Limits of the kept grammars: their number, and the characters of their texts together."""

CHEAP_SECONDS = 0.02
"""A grammar that compiles faster is compiled again for every request. Copies of a matcher share a lexer: its lock
makes their masks wait for each other, and its limit of states applies to all of them together."""

TRIED_TOKENS, TRIED_SECONDS = 16, 0.1
"""Limits of two trial answers at compile time: tokens of each, and seconds of both. They find most exceeded limits
early."""


@dataclass(frozen=True)
class Compiled:
    """A matcher at the beginning of its grammar, the seconds to compile it, the text, and the keywords of its schemas
    that it does not enforce."""

    matcher: LLMatcher
    seconds: float
    text: str
    unenforced: tuple[str, ...] = ()


class Compiler:
    """Compiles matchers from requests' arguments, all for one vocabulary. `closed`: objects of schemas have only the
    properties that the schemas name. May be used from any thread."""

    def __init__(self, tokens: LLTokenizer, trials: Trials, tag: TagRule, *, closed: bool) -> None:
        self._tokens = tokens
        self._trials = trials
        self._tag = tag
        self._closed = closed
        self._kept: OrderedDict[bytes, Compiled] = OrderedDict()
        self._characters = 0
        self._lock = threading.Lock()

    def compiled(self, args: Mapping[str, Any]) -> Compiled:
        """Returns a matcher at the grammar's beginning, which the caller owns. Raises ValueError for a wrong grammar,
        and RequestError (503) if the server is too busy."""
        asked = json.dumps(args)  # unsorted: answers have properties in this order
        key = hashlib.sha256(asked.encode()).digest()
        with self._lock:
            kept = self._kept.get(key)
            if kept is not None:
                self._kept.move_to_end(key)
        if kept is None:
            kept = self._first(key, asked, {text: self._tag(text) for text in tags_of(args)})
        elif kept.seconds < CHEAP_SECONDS:
            text, again = kept.text, kept.unenforced
            return _checked(_deep(lambda: compiled_again(text, self._tokens, again)))
        return Compiled(kept.matcher.deep_copy(), kept.seconds, kept.text, kept.unenforced)

    def _first(self, key: bytes, asked: str, tags: dict[str, str | None]) -> Compiled:
        answer = self._trials.answer(Question(asked, tags, self._closed))
        if answer.wrong:
            raise ValueError(answer.text)
        made = _checked(_deep(lambda: compiled(answer.text, self._tokens, answer.unenforced)))
        with self._lock:
            self._keep(key, made)
        return made

    def _keep(self, key: bytes, kept: Compiled) -> None:
        if key not in self._kept:
            self._kept[key] = kept
            self._characters += len(kept.text)
        while len(self._kept) > KEPT or (self._characters > KEPT_CHARACTERS and len(self._kept) > 1):
            self._characters -= len(self._kept.popitem(last=False)[1].text)


def _checked(made: Compiled | str) -> Compiled:
    if isinstance(made, str):
        raise ValueError(made)
    return made


def compiled_again(text: str, tokens: LLTokenizer, unenforced: tuple[str, ...] = ()) -> Compiled | str:
    """The same as `compiled`, for a text that is known to be right."""
    began = time.thread_time()
    matcher = LLMatcher(tokens, text, limits=limits.LIMITS, log_level=0)
    seconds = time.thread_time() - began
    return said(matcher.get_error()) if matcher.is_error() else Compiled(matcher, seconds, text, unenforced)


def compiled(text: str, tokens: LLTokenizer, unenforced: tuple[str, ...] = ()) -> Compiled | str:
    """A matcher, or the reason against it: also if no first token is possible, or two trial answers meet a limit."""
    made = compiled_again(text, tokens, unenforced)
    if isinstance(made, str):
        return made
    until = time.monotonic() + TRIED_SECONDS
    for which in (0, -1):  # short tokens have low numbers in most vocabularies, and long ones high numbers
        wrong = _try(made.matcher.deep_copy(), which, until)
        if wrong is not None:
            return wrong
    return made


def _try(matcher: LLMatcher, which: int, until: float) -> str | None:
    """Follows the first (`which` 0) or last (-1) allowed token, step by step. Returns what goes wrong, or None."""
    for n in range(TRIED_TOKENS):
        allowed = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        words = np.flatnonzero(allowed)
        if matcher.is_error():
            return said(matcher.get_error())
        if not words.size:
            return "nothing fits it" if n == 0 else None
        word = int(words[which])
        bits = np.flatnonzero(np.unpackbits(allowed[word : word + 1], bitorder="little"))
        matcher.consume_token(word * 8 + int(bits[which]))
        if matcher.is_error():
            return said(matcher.get_error())
        if matcher.is_stopped() or time.monotonic() > until:
            break
    return None


def failure_of(matcher: LLMatcher) -> Exception:
    """Returns the error that ended `matcher` within an answer: RequestError for a limit, which the client can stay
    below, and RuntimeError for all else, which is a bug."""
    error = matcher.get_error()
    if is_limit(error):
        return RequestError(f"in the middle of an answer: {said(error)}", code="invalid_value")
    return RuntimeError(said(error))


def _deep(work: Callable[[], Compiled | str]) -> Compiled | str:
    """Returns the result of `work` from a thread with a deep stack. `work` must be known to end."""
    result: list[Compiled | str] = []

    def run() -> None:
        try:
            result.append(work())
        except BaseException as error:  # noqa: BLE001 - a panic of the library is no Exception
            result.append(f"it cannot be compiled: {type(error).__name__}")

    thread = threading.Thread(target=run, name="guided-compile", daemon=True)
    with _STARTING:
        before = threading.stack_size(limits.STACK_BYTES)
        try:
            thread.start()
        finally:
            threading.stack_size(before)
    _STARTED.add(thread)
    thread.join()
    return result[0]


@atexit.register
def _settle() -> None:
    until = time.monotonic() + EXIT_SECONDS
    for thread in list(_STARTED):
        thread.join(max(0.0, until - time.monotonic()))


_STARTED: WeakSet[threading.Thread] = WeakSet()
_STARTING = threading.Lock()
