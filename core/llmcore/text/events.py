"""The events that output parsers make of a model's text: reasoning, tool calls, and the remaining text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TextDelta:
    """A piece of the answer itself."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """A piece of the model's reasoning before the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallBegun:
    """The beginning of a function call. `index` counts the calls of one choice from 0."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A piece of a call's arguments, as JSON text."""

    index: int
    arguments: str


@dataclass(frozen=True, slots=True)
class ToolCallEnded:
    """The end of a call's arguments. A call that the end of the output cuts off does not have this event."""

    index: int


Event = TextDelta | ReasoningDelta | ToolCallBegun | ToolCallDelta | ToolCallEnded


def joined(events: Iterable[Event]) -> Iterator[Event]:
    """`events` with neighbouring pieces of the same kind merged, and without empty ones."""
    last: Event | None = None
    for event in events:
        if isinstance(event, TextDelta | ReasoningDelta) and not event.text:
            continue
        if isinstance(event, ToolCallDelta) and not event.arguments:
            continue
        both = None if last is None else _both(last, event)
        if both is None and last is not None:
            yield last
        last = both or event
    if last is not None:
        yield last


def _both(a: Event, b: Event) -> Event | None:
    """Two neighbours merged into one event, or None if they do not belong together."""
    match a, b:
        case TextDelta(), TextDelta():
            return TextDelta(a.text + b.text)
        case ReasoningDelta(), ReasoningDelta():
            return ReasoningDelta(a.text + b.text)
        case ToolCallDelta(), ToolCallDelta() if a.index == b.index:
            return ToolCallDelta(a.index, a.arguments + b.arguments)
    return None
