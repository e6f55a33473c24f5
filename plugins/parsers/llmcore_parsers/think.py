"""Reasoning between `<think>` and `</think>`, before the answer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from llmcore.api.text import Event, ParserContext, ReasoningDelta, TextDelta

from llmcore_parsers.machine import first_tag

if TYPE_CHECKING:
    from llmcore.api.text import ParserSample

OPEN, CLOSE = "<think>", "</think>"


class ThinkParser:
    """What comes first, if it is in think tags, is reasoning; everything after it is text.

    Many chat templates write `<think>` themselves, so that the model begins inside: the end of the prompt says so.
    Newlines next to a tag belong to it. A call inside reasoning waits: if the reasoning ends, it was thought; if not,
    the model forgot to end it, and what begins with the call is text for the tool parser.
    """

    def __init__(self, context: ParserContext):
        self._held = ""
        self._inside = bool(context.thinking(OPEN, CLOSE))
        self._state = self._begin
        self._call_tags = tuple(context.call_tags)

    def feed(self, text: str) -> Iterator[Event]:
        """OutputParser."""
        self._held += text
        state = None
        while state != self._state:  # a state that hands over leaves text to the next
            state = self._state
            yield from state()

    def finish(self) -> Iterator[Event]:
        """OutputParser."""
        held, self._held = self._held, ""
        if self._state == self._think:
            yield ReasoningDelta(held)
        elif self._state == self._call:
            yield TextDelta(held)
        elif self._state == self._begin:
            yield ReasoningDelta(held.lstrip("\n")) if self._inside else TextDelta(held)

    def _begin(self) -> Iterator[Event]:
        """Nothing but whitespace, or a beginning of the tag, has come."""
        start = self._held.lstrip()
        if start.startswith(OPEN):
            self._held = start[len(OPEN) :]
            self._state = self._skip
        elif not OPEN.startswith(start):
            self._state = self._skip if self._inside else self._answer
        return iter(())

    def _skip(self) -> Iterator[Event]:
        """Newlines before the first thought."""
        self._held = self._held.lstrip("\n")
        if self._held:
            self._state = self._think
        return iter(())

    def _think(self) -> Iterator[Event]:
        before, tag, after = first_tag(self._held, (CLOSE, *self._call_tags))
        # Newlines wait: the tag may follow.
        shown = before.rstrip("\n")
        yield ReasoningDelta(shown)
        if tag == CLOSE:
            self._held, self._state = after, self._pause
        else:
            self._held = self._held[len(shown) :]
            if tag:
                self._state = self._call

    def _call(self) -> Iterator[Event]:
        """After a tag that begins a call."""
        thought, closed, after = self._held.partition(CLOSE)
        if closed:
            self._held, self._state = after, self._pause
            yield ReasoningDelta(thought.rstrip("\n"))

    def _pause(self) -> Iterator[Event]:
        """Newlines before the answer."""
        self._held = self._held.lstrip("\n")
        if self._held:
            self._state = self._answer
        return iter(())

    def _answer(self) -> Iterator[Event]:
        held, self._held = self._held, ""
        yield TextDelta(held)


def samples() -> Iterable[ParserSample]:
    """Outputs for the conformance check."""
    from llmcore.api.text import ParserSample

    thought, answer = ReasoningDelta("2 < 3,\n\nso </ yes"), TextDelta("Yes.\n</think>")
    text = "2 < 3,\n\nso </ yes\n</think>\n\nYes.\n</think>"
    yield ParserSample(text=f"<think>\n{text}", events=(thought, answer))
    yield ParserSample(text=text, context=ParserContext(prompt="<|user|>...<think>\n"), events=(thought, answer))
    yield ParserSample(text="\n<think></think>Yes.", events=(TextDelta("Yes."),))
    yield ParserSample(text=" <thinking> of nothing", events=(TextDelta(" <thinking> of nothing"),))
    closed = ParserContext(prompt="<think>\n\n</think>\n\n")
    yield ParserSample(text="No <think>.</think>", context=closed, events=(TextDelta("No <think>.</think>"),))
