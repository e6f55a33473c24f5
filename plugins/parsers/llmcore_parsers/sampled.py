"""What all notations' samples for the conformance check have in common."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from llmcore.api.text import Event, ParserContext, ToolCallBegun, ToolCallDelta, ToolCallEnded

if TYPE_CHECKING:
    from llmcore.api.text import ParserSample

Sample = tuple[str, tuple[Event, ...]]
"""An output, and the events it is."""


def called(index: int, name: str, arguments: str) -> tuple[Event, ...]:
    """The events of one whole call."""
    return ToolCallBegun(index, name), ToolCallDelta(index, arguments), ToolCallEnded(index)


def with_tools(samples: Iterable[Sample], weather: Mapping[str, Any] | None = None) -> Iterable[ParserSample]:
    """As answers to requests that have the tools `weather`, which may be described, and `add`."""
    from llmcore.api.text import ParserSample

    context = ParserContext(tools={"weather": weather or {}, "add": {}})
    for text, events in samples:
        yield ParserSample(text=text, context=context, events=events)
