"""Tool calls as Mistral's models write them: `[TOOL_CALLS] [{...}, {...}]`, and `[TOOL_CALLS]name[ARGS]{...}`."""

from __future__ import annotations

import re
from collections.abc import Iterable

from llmcore.api.text import ParserSample, TextDelta, ToolCallBegun, ToolCallDelta

from llmcore_parsers.json_calls import JsonCalls
from llmcore_parsers.sampled import Sample, called, with_tools

TAG, ID, ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_SEPARATORS = re.compile(r"[\s,]*")
_NAME = re.compile(r"[^\s\[{]*")
_LONGEST_ID = 64


class MistralToolParser(JsonCalls):
    """A list of objects, one object, or a name with its arguments. Releases of the models differ.

    A call of a function that the request does not have is text, tag included.
    """

    OPENERS = (TAG,)

    def _opened(self) -> bool:
        rest = self._skip_space()
        if not rest:
            return False
        if rest[0] == "[":
            self._gap, self._held, self._state = self._gap + "[", rest[1:], self._listed
        elif rest[0] == "{":
            self._enter_call()
        else:
            self._state = self._named
        return True

    def _listed(self) -> bool:
        """State before the first object of a list."""
        return super()._opened()

    def _named(self) -> bool:
        found = _NAME.match(self._held)
        name = found[0] if found else ""
        rest = self._held[len(name) :]
        if not rest:
            return False if any(tool.startswith(name) for tool in self._tools) else self._refuse()
        if name not in self._tools:
            return self._refuse()
        if rest.startswith(ID):
            end = rest.find("[", len(ID))
            if max(end, len(rest) if end < 0 else 0) > len(ID) + _LONGEST_ID:
                return self._refuse()
            rest = rest[end:] if end >= 0 else ""
        elif ID.startswith(rest):
            return False
        if ARGUMENTS.startswith(rest) and rest != ARGUMENTS:
            return False
        rest = rest.removeprefix(ARGUMENTS).lstrip()
        if not rest:
            return False
        if rest[0] != "{":
            return self._refuse()
        self._begin(name)
        self._held = rest
        self._enter_arguments(in_object=False)
        return True

    def _between(self) -> bool:
        """State in a list: the next object or the list's end follows."""
        rest = _SEPARATORS.sub("", self._held, count=1)
        if not rest:
            return False
        if rest[0] == "{":
            self._gap, self._held = self._held.removesuffix(rest), rest
            self._enter_call()
            return True
        if rest[0] == "]" and self._after_call:
            self._held = rest[1:]
        self._state = self._text
        return True


def samples() -> Iterable[ParserSample]:
    """Yields outputs for the conformance check."""
    return with_tools(_SAMPLES)


_PLACE = '{"place": "R] {m \\"", "days": [1, {"n": [2]}]}'

_SAMPLES: tuple[Sample, ...] = (
    (
        f'Let me see.[TOOL_CALLS] [{{"name": "weather", "arguments": {_PLACE}}}, '
        '{"name": "add", "arguments": {}, "id": "abc}12345"}] ',
        (TextDelta("Let me see."), *called(0, "weather", _PLACE), *called(1, "add", "{}")),
    ),
    (
        f"[TOOL_CALLS]weather[ARGS]{_PLACE}[TOOL_CALLS]add[CALL_ID]abc123456[ARGS] {{}} Done",
        (*called(0, "weather", _PLACE), *called(1, "add", "{}"), TextDelta(" Done")),
    ),
    ('[TOOL_CALLS]{"arguments": {"é": 1}, "name": "add"}', called(0, "add", '{"é": 1}')),
    (
        '[TOOL_CALLS][{"name": "no", "arguments": {}}, {"name": "add", "arguments": {}}]',
        (TextDelta('[TOOL_CALLS][{"name": "no", "arguments": {}}'), *called(0, "add", "{}")),
    ),
    ("[TOOL_CALLS]no[ARGS]{}", (TextDelta("[TOOL_CALLS]no[ARGS]{}"),)),
    ("[TOOL_CALLS]add[NO]{}", (TextDelta("[TOOL_CALLS]add[NO]{}"),)),
    ("[TOOL_CALLS]add[ARGS][CALL_ID]", (TextDelta("[TOOL_CALLS]add[ARGS][CALL_ID]"),)),
    ("[TOOL_CALLS] [ ] and [TOOL_", (TextDelta("[TOOL_CALLS] [ ] and [TOOL_"),)),
    ('[TOOL_CALLS]add{"a": 1', (ToolCallBegun(0, "add"), ToolCallDelta(0, '{"a": 1'))),
    ('[TOOL_CALLS] [{"name": "add"', (TextDelta('[TOOL_CALLS] [{"name": "add"'),)),
)
