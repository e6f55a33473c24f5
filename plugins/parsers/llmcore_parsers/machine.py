"""What parsers of tool calls have in common: text until a tag, calls, and closing tags that a model may forget."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from llmcore.api.text import Event, ParserContext, TextDelta, ToolCallBegun, ToolCallDelta, ToolCallEnded, held_back


def first_tag(text: str, tags: Sequence[str]) -> tuple[str, str, str]:
    """(what is before the first of `tags`, that tag, what is after it).

    Without one: (what cannot belong to a tag, "", what may be the beginning of one).
    """
    at, found = len(text), ""
    for tag in tags:
        place = text.find(tag, 0, at + len(tag) - 1)
        if place >= 0:
            at, found = place, tag
    if found:
        return text[:at], found, text[at + len(found) :]
    end = len(text) - max(held_back(text, tag) for tag in tags)
    return text[:end], "", text[end:]


class Calls:
    """A machine whose state is the place in the notation; each state takes what it can from `_held`.

    A subclass names the tags that begin calls (`OPENERS`), those that may follow one in their order (`CLOSERS`), and
    has `_opened`, the state after an opener. A state returns whether the next one can go on at once.
    """

    OPENERS: tuple[str, ...]
    CLOSERS: tuple[str, ...] = ()

    def __init__(self, context: ParserContext):
        self._tools = context.tools
        self._held = ""
        self._gap = ""
        """Whitespace and tags that were read: text, unless a call follows."""
        self._tag = ""
        self._calls = 0
        self._after_call = False
        self._closer = 0
        self._out: list[Event] = []
        self._state: Callable[[], bool] = self._text

    def feed(self, text: str) -> list[Event]:
        """OutputParser."""
        out: list[Event] = []
        self._out = out
        self._held += text
        while self._state():
            pass
        return out

    def finish(self) -> list[Event]:
        """OutputParser."""
        self._out = []
        self._end_of_output()
        rest = self._gap + self._held
        if not (self._after_call and rest.isspace()):
            self._show(rest)
        return self._out

    def _end_of_output(self) -> None:
        """For a state that can say more of what it holds than that it is text."""

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
        """After a call: what is left of `CLOSERS`, each of which may be missing."""
        rest = self._held.lstrip()
        for i in range(self._closer, len(self.CLOSERS)):
            if rest.startswith(self.CLOSERS[i]):
                self._held, self._closer = rest[len(self.CLOSERS[i]) :], i + 1
                return True
        if any(tag.startswith(rest) for tag in self.CLOSERS[self._closer :]):
            return False
        self._state = self._text
        return True

    # --- what states say

    def _show(self, text: str) -> None:
        if text:
            self._after_call = False
            self._out.append(TextDelta(text))

    def _refuse(self) -> bool:
        """The tags that were read are text; what follows is read as text."""
        self._show(self._gap)
        self._gap, self._state = "", self._text
        return True

    def _skip_space(self) -> str:
        """What is held, its leading whitespace gone to the gap."""
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
        """The call is complete."""
        self._out.append(ToolCallEnded(self._calls))
        self._calls += 1
        self._after_call, self._closer, self._state = True, 0, self._closing
