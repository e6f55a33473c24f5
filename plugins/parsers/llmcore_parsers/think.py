"""Reasoning between `<think>` and `</think>`, before the answer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from llmcore.api.text import Event, ParserContext, ParserSample, ReasoningDelta, TextDelta

from llmcore_parsers.machine import first_tag

OPEN, CLOSE = "<think>", "</think>"


class ThinkParser:
    """Splits an answer into reasoning, if it begins with think tags, and text.

    Many chat templates write `<think>` themselves. The end of the prompt then shows that the model begins inside.
    Newlines next to a tag belong to the tag. A call inside reasoning waits: if the reasoning ends, the call is
    reasoning. If not, the model forgot the closing tag, and the tool parser gets the text from the call on.
    """

    def __init__(self, context: ParserContext):
        self._held = ""
        self._inside = bool(context.thinking(OPEN, CLOSE))
        self._state = self._begin
        self._call_tags = tuple(context.call_tags)

    def feed(self, text: str) -> Iterator[Event]:
        """See api.text.OutputParser."""
        self._held += text
        state = None
        while state != self._state:  # the new state gets the text that this one leaves
            state = self._state
            yield from state()

    def finish(self) -> Iterator[Event]:
        """See api.text.OutputParser."""
        held, self._held = self._held, ""
        if self._state == self._think:
            yield ReasoningDelta(held)
        elif self._state == self._call:
            yield TextDelta(held)
        elif self._state == self._begin:
            yield ReasoningDelta(held.lstrip("\n")) if self._inside else TextDelta(held)

    def _begin(self) -> Iterator[Event]:
        """State in which only whitespace, or the beginning of the tag, has come."""
        start = self._held.lstrip()
        if start.startswith(OPEN):
            self._held = start[len(OPEN) :]
            self._state = self._skip
        elif not OPEN.startswith(start):
            self._state = self._skip if self._inside else self._answer
        return iter(())

    def _skip(self) -> Iterator[Event]:
        """State in the newlines before the first thought."""
        self._held = self._held.lstrip("\n")
        if self._held:
            self._state = self._think
        return iter(())

    def _think(self) -> Iterator[Event]:
        before, tag, after = first_tag(self._held, (CLOSE, *self._call_tags))
        # Newlines wait: the closing tag may follow and owns them.
        shown = before.rstrip("\n")
        yield ReasoningDelta(shown)
        if tag == CLOSE:
            self._held, self._state = after, self._pause
        else:
            self._held = self._held[len(shown) :]
            if tag:
                self._state = self._call

    def _call(self) -> Iterator[Event]:
        """State after a tag that begins a call."""
        thought, closed, after = self._held.partition(CLOSE)
        if closed:
            self._held, self._state = after, self._pause
            yield ReasoningDelta(thought.rstrip("\n"))

    def _pause(self) -> Iterator[Event]:
        """State in the newlines before the answer."""
        self._held = self._held.lstrip("\n")
        if self._held:
            self._state = self._answer
        return iter(())

    def _answer(self) -> Iterator[Event]:
        held, self._held = self._held, ""
        yield TextDelta(held)


def samples() -> Iterable[ParserSample]:
    """Yields outputs for the conformance check."""
    thought, answer = ReasoningDelta("2 < 3,\n\nso </ yes"), TextDelta("Yes.\n</think>")
    text = "2 < 3,\n\nso </ yes\n</think>\n\nYes.\n</think>"
    yield ParserSample(text=f"<think>\n{text}", events=(thought, answer))
    yield ParserSample(text=text, context=ParserContext(prompt="<|user|>...<think>\n"), events=(thought, answer))
    yield ParserSample(text="\n<think></think>Yes.", events=(TextDelta("Yes."),))
    yield ParserSample(text=" <thinking> of nothing", events=(TextDelta(" <thinking> of nothing"),))
    closed = ParserContext(prompt="<think>\n\n</think>\n\n")
    yield ParserSample(text="No <think>.</think>", context=closed, events=(TextDelta("No <think>.</think>"),))
