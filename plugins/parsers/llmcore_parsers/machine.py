"""The base of tool-call parsers: text until a tag, calls, and closing tags that a model may forget."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from llmcore.api.text import Event, ParserContext, TextDelta, ToolCallBegun, ToolCallDelta, ToolCallEnded, held_back


def first_tag(text: str, tags: Sequence[str]) -> tuple[str, str, str]:
    """Returns (text before the first of `tags`, that tag, text after it).

    Without a tag: (text that cannot belong to a tag, "", text that may be the beginning of one).
    """
    at, found, held = len(text), "", 0
    for tag in tags:
        place = text.find(tag, 0, at + len(tag) - 1)
        if place >= 0:
            at, found = place, tag
        elif not found and (size := held_back(text, tag)) > held:
            held = size
    if found:
        return text[:at], found, text[at + len(found) :]
    end = len(text) - held
    return text[:end], "", text[end:]


class Calls:
    """A state machine. The state is the place in the notation, and each state consumes text from `_held`.

    A subclass names the tags that begin calls (`OPENERS`) and those that may follow a call, in order (`CLOSERS`). Its
    `_opened` is the state after an opener. A state returns True if the next state can go on at once.
    """

    OPENERS: tuple[str, ...]
    CLOSERS: tuple[str, ...] = ()

    def __init__(self, context: ParserContext):
        self._tools = context.tools
        self._held = ""
        self._gap = ""
        """Whitespace and tags that were read. They are text, unless a call follows."""
        self._tag = ""
        self._calls = 0
        self._after_call = False
        self._closer = 0
        self._out: list[Event] = []
        self._state: Callable[[], bool] = self._text

    def feed(self, text: str) -> list[Event]:
        """See api.text.OutputParser."""
        out: list[Event] = []
        self._out = out
        self._held += text
        self._go_on()
        return out

    def finish(self) -> list[Event]:
        """See api.text.OutputParser."""
        self._out = []
        self._end_of_output()
        rest = self._gap + self._held
        if not (self._after_call and rest.isspace()):
            self._show(rest)
        return self._out

    def _go_on(self) -> None:
        """Enter states, until one needs more text."""
        while self._state():
            pass

    def _end_of_output(self) -> None:
        """Called at the end of the output. A state that can parse the held text overrides it; by default it is
        text."""

    def _text(self) -> bool:
        before, tag, after = first_tag(self._held, self.OPENERS)
        shown = before.rstrip()
        self._show(shown)
        if not tag:
            self._held = self._held[len(shown) :]
            return False
        self._tag, self._gap, self._held, self._state = tag, before[len(shown) :] + tag, after, self._opened
        return True

    def _opened(self) -> bool:
        raise NotImplementedError

    def _closing(self) -> bool:
        """State after a call: the rest of `CLOSERS`. A model may forget each of them."""
        rest = self._held.lstrip()
        for i in range(self._closer, len(self.CLOSERS)):
            if rest.startswith(self.CLOSERS[i]):
                self._held, self._closer = rest[len(self.CLOSERS[i]) :], i + 1
                return True
        if any(tag.startswith(rest) for tag in self.CLOSERS[self._closer :]):
            return False
        self._state = self._text
        return True

    # --- what states call

    def _show(self, text: str) -> None:
        if text:
            self._after_call = False
            self._out.append(TextDelta(text))

    def _refuse(self) -> bool:
        """Turn the tags that were read into text, and go on in text."""
        self._show(self._gap)
        self._gap, self._state = "", self._text
        return True

    def _skip_space(self) -> str:
        """Move leading whitespace from the held text to the gap. Returns the rest."""
        rest = self._held.lstrip()
        self._gap += self._held[: len(self._held) - len(rest)]
        self._held = rest
        return rest

    def _begin(self, name: str) -> None:
        self._gap = ""
        self._out.append(ToolCallBegun(self._calls, name))

    def _arguments_come(self, arguments: str) -> None:
        if arguments:
            self._out.append(ToolCallDelta(self._calls, arguments))

    def _end(self) -> None:
        """End a complete call."""
        self._out.append(ToolCallEnded(self._calls))
        self._calls += 1
        self._after_call, self._closer, self._state = True, 0, self._closing
