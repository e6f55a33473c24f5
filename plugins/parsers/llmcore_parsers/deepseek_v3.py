"""Tool calls as DeepSeek V3 and R1 write them: a name, and arguments in a block of JSON, between tags."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

from llmcore.api.text import Event, ParserContext, TextDelta, ToolCallBegun, ToolCallDelta, ToolCallEnded

from llmcore_parsers.json_calls import JsonCalls

if TYPE_CHECKING:
    from llmcore.testing import ParserSample

CALLS, CALL, SEPARATOR = "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"
CALL_END, CALLS_END = "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"
FENCE = "```"
_LONGEST_HEAD = 512


class DeepSeekV3ToolParser(JsonCalls):
    """`CALLS CALL function SEPARATOR name`, a line each for the fence, the arguments and the fence, `CALL_END`, ...

    A call is announced when its arguments begin. What is no call of one of the request's tools is text, its tags
    included.
    """

    OPENERS = (CALLS, CALL)
    CLOSERS: tuple[str, ...] = (FENCE, CALL_END, CALLS_END)
    HEAD = re.compile(rf"[^<]*{re.escape(SEPARATOR)}\s*([^\s<]+)\s*```(?:json)?\s*(?=\{{)")
    """From behind CALL to the arguments."""

    def _opened(self) -> bool:
        if self._tag == CALL:
            self._state = self._head
            return True
        rest = self._skip_space()
        if rest.startswith(CALL):
            self._gap, self._held, self._state = self._gap + CALL, rest[len(CALL) :], self._head
            return True
        return False if CALL.startswith(rest) else self._refuse()

    def _head(self) -> bool:
        head = self.HEAD.match(self._held, 0, _LONGEST_HEAD)
        if head is not None and head[1] in self._tools:
            self._begin(head[1])
            self._held = self._held[head.end() :]
            self._enter_arguments(in_object=False)
            return True
        if head is not None or len(self._held) >= _LONGEST_HEAD or CALL_END in self._held:
            return self._refuse()
        return False


def samples() -> Iterable[ParserSample]:
    """Outputs for the conformance check."""
    from llmcore.testing import ParserSample

    context = ParserContext(tools={"weather": {}, "add": {}})
    for text, events in _SAMPLES:
        yield ParserSample(text=text, context=context, events=events)


def _called(index: int, name: str, arguments: str) -> tuple[Event, ...]:
    return ToolCallBegun(index, name), ToolCallDelta(index, arguments), ToolCallEnded(index)


def _written(name: str, arguments: str) -> str:
    return f"{CALL}function{SEPARATOR}{name}\n```json\n{arguments}\n```{CALL_END}"


_PLACE = '{"place": "R ``` {m \\"", "days": [1, {"n": [2]}]}'
_UNKNOWN = f"{CALLS}{_written('no', '{}')}\n{CALLS_END} b"

_SAMPLES: tuple[tuple[str, tuple[Event, ...]], ...] = (
    (
        f"Let me see.\n{CALLS}{_written('weather', _PLACE)}\n{_written('add', '{}')}{CALLS_END}\n",
        (TextDelta("Let me see."), *_called(0, "weather", _PLACE), *_called(1, "add", "{}")),
    ),
    (f"{_written('add', '{}')} Done", (*_called(0, "add", "{}"), TextDelta(" Done"))),
    (
        f"{CALLS}{_written('no', '{}')}\n{_written('add', '{}')}",
        (TextDelta(f"{CALLS}{_written('no', '{}')}"), *_called(0, "add", "{}")),
    ),
    (_UNKNOWN, (TextDelta(_UNKNOWN),)),
    (f"{CALLS} and {CALL}function{SEPARATOR}add\n", (TextDelta(f"{CALLS} and {CALL}function{SEPARATOR}add\n"),)),
    (f"{_written('add', '{')[:-20]}", (ToolCallBegun(0, "add"), ToolCallDelta(0, "{\n"))),
)
