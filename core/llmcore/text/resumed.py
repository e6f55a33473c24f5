"""Parsing an answer that goes on with a message which the client has begun."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Protocol

from llmcore.text.events import Event, ReasoningDelta, TextDelta, ToolCallBegun, ToolCallDelta, ToolCallEnded, joined

_TEXTS = (TextDelta, ReasoningDelta)


class Parser(Protocol):
    """What is needed of an OutputParser."""

    def feed(self, text: str) -> Iterable[Event]:
        """OutputParser."""

    def finish(self) -> Iterable[Event]:
        """OutputParser."""


@dataclass(frozen=True)
class Beginning:
    """What a parser makes of `text`, the beginning of a message.

    `calls`: how many are complete. `open`: the events of the one that is not. `undecided`: the end of `text` that may
    be the beginning of markup, as it comes if it is none.
    """

    text: str
    calls: int
    open: tuple[Event, ...]
    undecided: str

    @property
    def within_markup(self) -> bool:
        """Whether the answer goes on in the middle of a call, or of what may become one."""
        return bool(self.open or self.undecided.strip())


def begin(make: Callable[[], Parser], text: str, call_tags: Sequence[str]) -> Beginning:
    """See Beginning. `call_tags`: what calls begin with."""
    parser = make()
    events: list[Event] = []
    waiting = ""
    for piece in re.split(f"(?={'|'.join(map(re.escape, call_tags))})", text) if call_tags else (text,):
        more = list(joined(parser.feed(piece)))
        waiting = "" if more else waiting + piece
        events += more
    read, rest = list(joined(events)), list(joined(parser.finish()))
    shown = read[-1].text if read and isinstance(read[-1], _TEXTS) else ""
    # As the parser would show it now; where that is nothing, or a call, it may still come as text.
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
    """An OutputParser of what is new: `parser` reads the beginning, too, of which nothing comes again.

    But for a call that it leaves open: that comes whole, as the client has not seen its name and arguments as such.
    Those that are complete do not count.
    """

    def __init__(self, parser: Parser, beginning: Beginning):
        for _ in parser.feed(beginning.text):
            pass  # the iterable is to be read
        self._parser = parser
        self._calls = beginning.calls
        self._open: Iterable[Event] = beginning.open
        self._old = beginning.undecided

    def feed(self, text: str) -> Iterator[Event]:
        """OutputParser."""
        return self._new(self._parser.feed(text))

    def finish(self) -> Iterator[Event]:
        """OutputParser."""
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
        """`text` without what of it is old. Space before markup may have gone with other markup."""
        old = self._old[max(0, _space_before(self._old) - _space_before(text)) :]
        if old.startswith(text):
            self._old = old[len(text) :]
            return ""
        self._old = ""
        return text.removeprefix(old)
