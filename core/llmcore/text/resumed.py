"""Parse an answer that continues a message of the client."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Protocol

from llmcore.text.events import Event, ReasoningDelta, TextDelta, ToolCallBegun, ToolCallDelta, ToolCallEnded, joined

_TEXTS = (TextDelta, ReasoningDelta)


class Parser(Protocol):
    """The part of OutputParser that this module uses."""

    def feed(self, text: str) -> Iterable[Event]:
        """See OutputParser."""

    def finish(self) -> Iterable[Event]:
        """See OutputParser."""


@dataclass(frozen=True)
class Beginning:
    """The result of a parser for the beginning of a message."""

    text: str
    """The beginning of the message."""
    calls: int
    """Number of complete calls in it."""
    open: tuple[Event, ...]
    """The events of the call that is not complete."""
    undecided: str
    """The end of `text` that may be the beginning of markup, as the parser shows it if it is plain text."""

    @property
    def within_markup(self) -> bool:
        """True if the answer goes on in the middle of a call, or of text that may become a call."""
        return bool(self.open or self.undecided.strip())


def begin(make: Callable[[], Parser], text: str, call_tags: Sequence[str]) -> Beginning:
    """Parse `text`, the beginning of a message. `call_tags`: the texts that begin calls."""
    parser = make()
    events: list[Event] = []
    waiting = ""
    for piece in re.split(f"(?={'|'.join(map(re.escape, call_tags))})", text) if call_tags else (text,):
        more = list(joined(parser.feed(piece)))
        waiting = "" if more else waiting + piece
        events += more
    read, rest = list(joined(events)), list(joined(parser.finish()))
    shown = read[-1].text if read and isinstance(read[-1], _TEXTS) else ""
    # Take the text as the parser would show it now. If it shows nothing, or a call, the rest may still become text.
    undecided = "".join(event.text for event in rest if isinstance(event, _TEXTS))
    if not undecided or len(rest) > 1:
        undecided = _space_after(text.removesuffix(waiting))[len(_space_after(shown)) :] + (waiting if rest else "")
    last = max((i for i, event in enumerate(read) if isinstance(event, ToolCallBegun)), default=len(read))
    ended = any(isinstance(event, ToolCallEnded) for event in read[last:])
    calls = sum(isinstance(event, ToolCallEnded) for event in read)
    return Beginning(text, calls, () if ended else tuple(read[last:]), undecided)


def _space_after(text: str) -> str:
    return text[len(text.rstrip()) :]


def _space_before(text: str) -> int:
    return len(text) - len(text.lstrip())


class Resumed:
    """An OutputParser for the new text. `parser` reads the beginning too, but its events are not repeated.

    The exception is a call that the beginning leaves open: it is sent as a whole, because the client has not seen its
    name and arguments as events. Complete calls of the beginning do not count in `index`.
    """

    def __init__(self, parser: Parser, beginning: Beginning):
        for _ in parser.feed(beginning.text):
            pass  # A parser works only while its iterable is read.
        self._parser = parser
        self._calls = beginning.calls
        self._open: Iterable[Event] = beginning.open
        self._old = beginning.undecided

    def feed(self, text: str) -> Iterator[Event]:
        """See OutputParser."""
        return self._new(self._parser.feed(text))

    def finish(self) -> Iterator[Event]:
        """See OutputParser."""
        return self._new(self._parser.finish())

    def _new(self, events: Iterable[Event]) -> Iterator[Event]:
        opened, self._open = self._open, ()
        for event in chain(opened, events):
            if isinstance(event, ToolCallBegun | ToolCallDelta | ToolCallEnded):
                self._old = ""
                yield replace(event, index=event.index - self._calls)
            elif event.text:
                yield replace(event, text=self._unseen(event.text))

    def _unseen(self, text: str) -> str:
        """`text` without its old part. The parser may have dropped the space before it together with markup."""
        old = self._old[max(0, _space_before(self._old) - _space_before(text)) :]
        if old.startswith(text):
            self._old = old[len(text) :]
            return ""
        self._old = ""
        return text.removeprefix(old)
