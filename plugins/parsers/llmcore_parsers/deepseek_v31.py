"""Tool calls as DeepSeek V3.1 writes them: a name and its arguments, between tags."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

from llmcore.api.text import Event, ParserContext, TextDelta, ToolCallBegun, ToolCallDelta, ToolCallEnded

from llmcore_parsers.deepseek_v3 import CALL, CALL_END, CALLS, CALLS_END, SEPARATOR, DeepSeekV3ToolParser

if TYPE_CHECKING:
    from llmcore.testing import ParserSample


class DeepSeekV31ToolParser(DeepSeekV3ToolParser):
    """`CALLS CALL name SEPARATOR {arguments} CALL_END ... CALLS_END`."""

    CLOSERS = (CALL_END, CALLS_END)
    HEAD = re.compile(rf"\s*([^\s<]+)\s*{re.escape(SEPARATOR)}\s*(?=\{{)")


def samples() -> Iterable[ParserSample]:
    """Outputs for the conformance check."""
    from llmcore.testing import ParserSample

    context = ParserContext(tools={"weather": {}, "add": {}})
    for text, events in _SAMPLES:
        yield ParserSample(text=text, context=context, events=events)


def _called(index: int, name: str, arguments: str) -> tuple[Event, ...]:
    return ToolCallBegun(index, name), ToolCallDelta(index, arguments), ToolCallEnded(index)


def _written(name: str, arguments: str) -> str:
    return f"{CALL}{name}{SEPARATOR}{arguments}{CALL_END}"


_PLACE = '{"place": "R} {m \\"", "days": [1, {"n": [2]}]}'
_UNKNOWN = f"{CALLS}{_written('no', '{}')}{CALLS_END} b"

_SAMPLES: tuple[tuple[str, tuple[Event, ...]], ...] = (
    (
        f"Let me see.\n{CALLS}{_written('weather', _PLACE)}{_written('add', '{}')}{CALLS_END}",
        (TextDelta("Let me see."), *_called(0, "weather", _PLACE), *_called(1, "add", "{}")),
    ),
    (f"{_written('add', '{}')} Done", (*_called(0, "add", "{}"), TextDelta(" Done"))),
    (
        f"{CALLS}{_written('no', '{}')}{_written('add', '{}')}",
        (TextDelta(f"{CALLS}{_written('no', '{}')}"), *_called(0, "add", "{}")),
    ),
    (_UNKNOWN, (TextDelta(_UNKNOWN),)),
    (f"{CALLS} and {CALL}add{SEPARATOR}", (TextDelta(f"{CALLS} and {CALL}add{SEPARATOR}"),)),
    (f'{CALL}add{SEPARATOR}{{"a": "', (ToolCallBegun(0, "add"), ToolCallDelta(0, '{"a": "'))),
)
