"""Tool calls as DeepSeek V3.1 writes them: a name and its arguments, between tags."""

from __future__ import annotations

import re
from collections.abc import Iterable

from llmcore.api.text import ParserSample, TextDelta, ToolCallBegun, ToolCallDelta

from llmcore_parsers.deepseek_v3 import (
    CALL,
    CALL_END,
    CALLS,
    CALLS_END,
    SEPARATOR,
    DeepSeekV3ToolParser,
    shared_samples,
)
from llmcore_parsers.sampled import Sample, with_tools


class DeepSeekV31ToolParser(DeepSeekV3ToolParser):
    """`CALLS CALL name SEPARATOR {arguments} CALL_END ... CALLS_END`."""

    CLOSERS = (CALL_END, CALLS_END)
    HEAD = re.compile(rf"\s*([^\s<]+)\s*{re.escape(SEPARATOR)}\s*(?=\{{)")


def samples() -> Iterable[ParserSample]:
    """Outputs for the conformance check."""
    return with_tools(_SAMPLES)


def _written(name: str, arguments: str) -> str:
    return f"{CALL}{name}{SEPARATOR}{arguments}{CALL_END}"


_HALF = f"{CALLS} and {CALL}add{SEPARATOR}"

_SAMPLES: tuple[Sample, ...] = (
    *shared_samples(_written, "", '{"place": "R} {m \\"", "days": [1, {"n": [2]}]}'),
    (_HALF, (TextDelta(_HALF),)),
    (f'{CALL}add{SEPARATOR}{{"a": "', (ToolCallBegun(0, "add"), ToolCallDelta(0, '{"a": "'))),
)
