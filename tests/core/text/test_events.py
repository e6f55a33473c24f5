"""Events of output parsers: neighbours join."""

from __future__ import annotations

from llmcore.text.events import (
    ReasoningDelta,
    TextDelta,
    ToolCallBegun,
    ToolCallDelta,
    ToolCallEnded,
    joined,
)


def test_joined() -> None:
    events = [
        TextDelta("a"),
        TextDelta(""),
        TextDelta("b"),
        ReasoningDelta("c"),
        ToolCallBegun(0, "f"),
        ToolCallDelta(0, "{"),
        ToolCallDelta(0, "}"),
        ToolCallEnded(0),
        ToolCallDelta(1, "x"),
        ToolCallDelta(2, "y"),
    ]
    assert list(joined(events)) == [
        TextDelta("ab"),
        ReasoningDelta("c"),
        ToolCallBegun(0, "f"),
        ToolCallDelta(0, "{}"),
        ToolCallEnded(0),
        ToolCallDelta(1, "x"),
        ToolCallDelta(2, "y"),
    ]
    assert list(joined([TextDelta("")])) == []
