"""Tool calls as Qwen 2.5, Qwen 3 and Hermes write them: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from llmcore.api.text import Event, ParserContext, TextDelta, ToolCallBegun, ToolCallDelta, ToolCallEnded, before_tag

from llmcore_parsers.brackets import Brackets
from llmcore_parsers.sampled import Sample, called, with_tools

if TYPE_CHECKING:
    from llmcore.api.text import ParserSample

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"arguments"\s*:\s*(?=\{)', re.DOTALL)


class QwenToolParser:
    """A call is announced when its name is known and its arguments begin; these follow as they come.

    A call written otherwise (arguments before the name, or none) is read when it is complete. What is no call of one
    of the request's tools is text, its tags included. Whitespace beside a call belongs to it.
    """

    OPENERS = (OPEN,)

    def __init__(self, context: ParserContext):
        self._tools = context.tools
        self._held = ""
        self._gap = ""
        """Whitespace before the tag that was read last."""
        self._calls = 0
        self._after_call = False
        self._brackets = Brackets()
        self._closed = False
        self._state: Callable[[], Generator[Event, None, bool]] = self._text

    def feed(self, text: str) -> Iterator[Event]:
        """OutputParser."""
        self._held += text
        while (yield from self._state()):
            pass

    def finish(self) -> Iterator[Event]:
        """OutputParser."""
        while self._state == self._call:
            yield from self._whole(self._held, "")
            yield from self.feed("")
        if self._state == self._text and not (self._after_call and self._held.isspace()):
            yield TextDelta(self._held)

    # --- one state per place in the notation: takes what it can from `_held`; whether the next one can go on

    def _text(self) -> Generator[Event, None, bool]:
        before, after = before_tag(self._held, OPEN)
        shown = before.rstrip()
        if shown:
            self._after_call = False
            yield TextDelta(shown)
        if after is None:
            self._held = self._held[len(shown) :]
            return False
        self._held, self._gap, self._state = after, before[len(shown) :], self._call
        return True

    def _call(self) -> Generator[Event, None, bool]:
        """After the opening tag, until it is clear what is called."""
        if self._held.lstrip()[:1] not in ("", "{"):
            return (yield from self._no_call())
        head, close = _HEAD.match(self._held), self._held.find(CLOSE)
        if head is not None and (close < 0 or head.end() <= close):
            name = _decoded(head[1])
            if name not in self._tools:
                return (yield from self._no_call())
            yield ToolCallBegun(self._calls, name)
            self._held, self._brackets, self._state = self._held[head.end() :], Brackets(), self._arguments
            return True
        if close < 0:
            return False
        return (yield from self._whole(self._held[:close], self._held[close + len(CLOSE) :]))

    def _arguments(self) -> Generator[Event, None, bool]:
        end = self._brackets.end(self._held)
        if end is None:
            yield ToolCallDelta(self._calls, self._held)
            self._held = ""
            return False
        yield ToolCallDelta(self._calls, self._held[:end])
        yield ToolCallEnded(self._calls)
        self._calls += 1
        self._held, self._closed, self._state = self._held[end:], False, self._tail
        return True

    def _tail(self) -> Generator[Event, None, bool]:
        """After the arguments: the call's own bracket and the closing tag, which models sometimes forget."""
        yield from ()
        rest = self._held.lstrip()
        if rest.startswith("}") and not self._closed:
            self._held, self._closed = rest[1:], True
            return True
        if CLOSE.startswith(rest) and rest != CLOSE:
            return False
        if rest.startswith(CLOSE):
            self._held = rest[len(CLOSE) :]
        self._after_call, self._state = True, self._text
        return True

    # --- calls that are read at once

    def _whole(self, body: str, rest: str) -> Generator[Event, None, bool]:
        """`body` stood between the tags."""
        call = _decoded(body)
        if not isinstance(call, dict) or not {"name"} <= call.keys() <= {"name", "arguments"}:
            return (yield from self._no_call())
        name, arguments = call["name"], call.get("arguments", {})
        if not isinstance(name, str) or name not in self._tools or not isinstance(arguments, dict):
            return (yield from self._no_call())
        yield ToolCallBegun(self._calls, name)
        yield ToolCallDelta(self._calls, json.dumps(arguments))
        yield ToolCallEnded(self._calls)
        self._calls += 1
        self._held, self._after_call, self._state = rest, True, self._text
        return True

    def _no_call(self) -> Generator[Event, None, bool]:
        """The tag was text; what follows it is read again."""
        yield TextDelta(self._gap + OPEN)
        self._after_call, self._state = False, self._text
        return True


def _decoded(text: str) -> Any:
    try:
        return json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return None


def samples() -> Iterable[ParserSample]:
    """Outputs for the conformance check."""
    return with_tools(_SAMPLES)


_PLACE = '{"place": "Rom }\\"\\\\", "days": [1, {"n": 2}]}'
_UNKNOWN = 'a <tool_call>\n{"name": "no", "arguments": {}}\n</tool_call> b '

_SAMPLES: tuple[Sample, ...] = (
    (
        f'Let me see.\n<tool_call>\n{{"name": "weather", "arguments": {_PLACE}}}\n</tool_call>\n'
        '<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>\n',
        (TextDelta("Let me see."), *called(0, "weather", _PLACE), *called(1, "add", "{}")),
    ),
    (
        '<tool_call>{"arguments": {"a": "é"}, "name": "add"}</tool_call> Done.',
        (*called(0, "add", '{"a": "\\u00e9"}'), TextDelta(" Done.")),
    ),
    ('<tool_call>{"name": "add"}</tool_call>', called(0, "add", "{}")),
    ('<tool_call>{"name": "add", "arguments": {"a": 1}\n</tool_call>', called(0, "add", '{"a": 1}')),
    ('<tool_call>{"name": "add", "arguments": {}} <', (*called(0, "add", "{}"),)),
    (_UNKNOWN, (TextDelta(_UNKNOWN),)),
    ("use <tool_call> or <tool_", (TextDelta("use <tool_call> or <tool_"),)),
    (
        '<tool_call>{"name": <tool_call>{"name": "add", "arguments": {"a": 1',
        (TextDelta('<tool_call>{"name":'), ToolCallBegun(0, "add"), ToolCallDelta(0, '{"a": 1')),
    ),
)
