"""Tool calls as DeepSeek V3 and R1 write them: a name, and arguments in a block of JSON, between tags."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

from llmcore.api.text import ParserSample, TextDelta, ToolCallBegun, ToolCallDelta

from llmcore_parsers.json_calls import JsonCalls
from llmcore_parsers.sampled import Sample, called, with_tools

CALLS, CALL, SEPARATOR = "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"
CALL_END, CALLS_END = "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"
FENCE = "```"
_LONGEST_HEAD = 512


class DeepSeekV3ToolParser(JsonCalls):
    """`CALLS CALL function SEPARATOR name`, a line each for the fence, the arguments and the fence, `CALL_END`, ...

    The parser announces a call when its arguments begin. A call of a function that the request does not have is text,
    tags included.
    """

    OPENERS = (CALLS, CALL)
    CLOSERS: tuple[str, ...] = (FENCE, CALL_END, CALLS_END)
    HEAD = re.compile(rf"[^<]*{re.escape(SEPARATOR)}\s*([^\s<]+)\s*```(?:json)?\s*(?=\{{)")
    """Matches from behind CALL to the arguments."""

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
    """Yields outputs for the conformance check."""
    return with_tools(_SAMPLES)


def _written(name: str, arguments: str) -> str:
    return f"{CALL}function{SEPARATOR}{name}\n```json\n{arguments}\n```{CALL_END}"


def shared_samples(written: Callable[[str, str], str], gap: str, place: str) -> Iterable[Sample]:
    """Yields samples with `gap` between calls, and with `place` where it could be taken for the end of a call."""
    known, unknown = written("add", "{}"), f"{CALLS}{written('no', '{}')}"
    yield (
        f"Let me see.\n{CALLS}{written('weather', place)}{gap}{known}{CALLS_END}{gap}",
        (TextDelta("Let me see."), *called(0, "weather", place), *called(1, "add", "{}")),
    )
    yield f"{known} Done", (*called(0, "add", "{}"), TextDelta(" Done"))
    yield f"{unknown}{gap}{known}", (TextDelta(unknown), *called(0, "add", "{}"))
    yield f"{unknown}{gap}{CALLS_END} b", (TextDelta(f"{unknown}{gap}{CALLS_END} b"),)


_HALF = f"{CALLS} and {CALL}function{SEPARATOR}add\n"

_SAMPLES: tuple[Sample, ...] = (
    *shared_samples(_written, "\n", '{"place": "R ``` {m \\"", "days": [1, {"n": [2]}]}'),
    (_HALF, (TextDelta(_HALF),)),
    (f"{_written('add', '{')[:-20]}", (ToolCallBegun(0, "add"), ToolCallDelta(0, "{\n"))),
)
