"""Tool calls as Llama 3.1 and later write them: `<|python_tag|>{"name": ..., "parameters": {...}}; {...}`."""

from __future__ import annotations

import re
from collections.abc import Iterable

from llmcore.api.text import ParserContext, ParserSample, TextDelta, ToolCallBegun, ToolCallDelta

from llmcore_parsers.json_calls import JsonCalls
from llmcore_parsers.sampled import Sample, called, with_tools

TAG = "<|python_tag|>"
_SEPARATORS = re.compile(r"[\s;,]*")


class Llama3ToolParser(JsonCalls):
    """Objects after the tag. The answer may also begin with an object, as the chat templates show it.

    Further calls follow after ";", a comma, or only whitespace. An object that does not call one of the request's
    tools is text, tag included.
    """

    OPENERS = (TAG,)

    def __init__(self, context: ParserContext):
        super().__init__(context)
        self._state = self._start

    def _start(self) -> bool:
        rest = self._held.lstrip()
        if not rest:
            return False
        if rest[0] == "{":
            self._skip_space()
            self._enter_call()
        else:
            self._state = self._text
        return True

    def _between(self) -> bool:
        rest = _SEPARATORS.sub("", self._held, count=1)
        if not rest:
            return False
        separators = self._held.removesuffix(rest)
        if rest[0] == "{":
            self._gap, self._held = separators, rest
            self._enter_call()
        elif rest.startswith(TAG):
            self._gap, self._held, self._state = separators + TAG, rest[len(TAG) :], self._opened
        elif TAG.startswith(rest):
            return False
        else:
            self._state = self._text
        return True


def samples() -> Iterable[ParserSample]:
    """Yields outputs for the conformance check."""
    return with_tools(_SAMPLES)


_PLACE = '{"place": "R; {m \\"", "days": [1, {"n": 2}]}'

_SAMPLES: tuple[Sample, ...] = (
    ('{"name": "weather", "parameters": ' + _PLACE + "}", called(0, "weather", _PLACE)),
    (
        f'Let me see. {TAG}{{"name": "weather", "parameters": {_PLACE}}}; {{"name": "add", "parameters": {{}}}}\n',
        (TextDelta("Let me see."), *called(0, "weather", _PLACE), *called(1, "add", "{}")),
    ),
    (
        f'{TAG}{{"type": "function", "name": "add", "arguments": {{"a": 1}}}}'
        f'{TAG}{{"parameters": {{"é": 2}}, "name": "add"}}',
        (*called(0, "add", '{"a": 1}'), *called(1, "add", '{"é": 2}')),
    ),
    (
        '{"type": "function", "function": {"name": "add", "parameters": {}}} Done',
        (*called(0, "add", "{}"), TextDelta(" Done")),
    ),
    (
        f'{TAG}{{"name": "no", "parameters": {{}}}}; {{"name": "add", "parameters": {{}}}};',
        (TextDelta(f'{TAG}{{"name": "no", "parameters": {{}}}}'), *called(0, "add", "{}"), TextDelta(";")),
    ),
    (f'{TAG}add.call(a="1")', (TextDelta(f'{TAG}add.call(a="1")'),)),
    (' {"temperature": [3, {"name": "add"}]} ', (TextDelta(' {"temperature": [3, {"name": "add"}]} '),)),
    ('{"name": "add", "parameters": {"a": 1', (ToolCallBegun(0, "add"), ToolCallDelta(0, '{"a": 1'))),
    ('{"name": "add", "para', (TextDelta('{"name": "add", "para'),)),
    (f"see {TAG} or <|python", (TextDelta(f"see {TAG} or <|python"),)),
)
