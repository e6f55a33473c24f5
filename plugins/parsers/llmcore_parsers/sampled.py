"""Helpers for the notations' samples of the conformance check."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from llmcore.api.text import Event, ParserContext, ParserSample, ToolCallBegun, ToolCallDelta, ToolCallEnded

Sample = tuple[str, tuple[Event, ...]]
"""An output and its events."""


def called(index: int, name: str, arguments: str) -> tuple[Event, ...]:
    """Returns the events of one whole call."""
    return ToolCallBegun(index, name), ToolCallDelta(index, arguments), ToolCallEnded(index)


def with_tools(samples: Iterable[Sample], weather: Mapping[str, Any] | None = None) -> Iterable[ParserSample]:
    """Yields samples as answers to requests with the tools `weather` (its description may be given) and `add`."""
    context = ParserContext(tools={"weather": weather or {}, "add": {}})
    for text, events in samples:
        yield ParserSample(text=text, context=context, events=events)
