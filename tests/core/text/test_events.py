"""Events of output parsers: neighbours join, and the tokens of reasoning are counted."""

from __future__ import annotations

from llmcore.text.events import (
    ReasoningDelta,
    ReasoningTokens,
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


def test_reasoning_ends_at_the_first_token_of_the_answer() -> None:
    counter = ReasoningTokens()
    begun = ([ReasoningDelta(""), TextDelta("b")], [TextDelta("c")])
    for events in ([], [ReasoningDelta("so")], [TextDelta("")], *begun):
        counter.add(events)
    assert (counter.count, counter.over) == (3, True)


def test_an_answer_without_reasoning_has_no_reasoning_tokens() -> None:
    counter = ReasoningTokens()
    for events in ([], [ToolCallBegun(0, "f")], [ToolCallDelta(0, "{}")]):
        counter.add(events)
    assert (counter.count, counter.over) == (0, True)
