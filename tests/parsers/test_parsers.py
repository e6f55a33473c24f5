"""plugin-parsers: Qwen's and Hermes' tool calls, and think tags."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llmcore.api.text import (
    Event,
    OutputParser,
    ParserContext,
    ReasoningDelta,
    TextDelta,
    ToolCallBegun,
    ToolCallDelta,
    ToolCallEnded,
    joined,
)
from llmcore_devtools.conformance_parsing import parsed
from llmcore_parsers.brackets import Brackets
from llmcore_parsers.qwen import QwenToolParser
from llmcore_parsers.think import ThinkParser
from llmcore_server.chat.request_parsing import Chained

TOOLS = ParserContext(tools={"f": {}, "g h": {}})


def both(context: ParserContext) -> OutputParser:
    return Chained(ThinkParser(context), QwenToolParser(context))


def test_arguments_come_as_they_are_written() -> None:
    parser = QwenToolParser(TOOLS)
    text = '<tool_call>\n{"name": "f", "arguments": {"city": "Rome"}}\n</tool_call>'
    shown = [(char, list(parser.feed(char))) for char in text]
    assert next(i for i, (_, events) in enumerate(shown) if events) == text.index('{"city"')
    pieces = [event for _, events in shown for event in events]
    assert pieces[0] == ToolCallBegun(0, "f")
    assert [event.arguments for event in pieces if isinstance(event, ToolCallDelta)] == list('{"city": "Rome"}')
    assert pieces[-1] == ToolCallEnded(0)
    assert list(joined(parser.finish())) == []


def test_a_name_may_need_decoding() -> None:
    found = parsed(QwenToolParser, TOOLS, ['<tool_call>{"name": "g\\u0020h", "arguments": {}}</tool_call>'])
    assert found[0] == ToolCallBegun(0, "g h")


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>",
        "<tool_call></tool_call>",
        "<tool_call>[]</tool_call>",
        '<tool_call>{"name": "f", "arguments": "x"}</tool_call>',
        '<tool_call>{"name": "f", "arguments": []}</tool_call>',
        '<tool_call>{"name": "f", "id": 3}</tool_call>',
        '<tool_call>{"name": ["f"]}</tool_call>',
        '<tool_call>{"name": "\\q", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "</tool_call>", "arguments": {}}',
        '<tool_call>{"arguments": {}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": NaN}</tool_call>',
        " <tool_call>" + "[" * 100_000,
        '<tool_call>{"a": ' + "[" * 100_000 + "</tool_call>",
    ],
)
def test_what_is_no_call_is_text(text: str) -> None:
    assert parsed(QwenToolParser, TOOLS, [text]) == [TextDelta(text)]


def test_broken_arguments_are_passed_on() -> None:
    text = '<tool_call>{"name": "f", "arguments": {\'a\': None}}\n</tool_call>'
    assert parsed(QwenToolParser, TOOLS, text) == [
        ToolCallBegun(0, "f"),
        ToolCallDelta(0, "{'a': None}"),
        ToolCallEnded(0),
    ]


def test_a_call_that_is_cut_off_has_no_end() -> None:
    text = '<tool_call>{"name": "f", "arguments": {"a": "}</tool_call>'
    assert parsed(QwenToolParser, TOOLS, text) == [ToolCallBegun(0, "f"), ToolCallDelta(0, '{"a": "}</tool_call>')]


def test_a_call_without_its_closing_tag() -> None:
    text = '<tool_call>{"arguments": {"a": 1}, "name": "f"}'
    assert parsed(QwenToolParser, TOOLS, text)[0] == ToolCallBegun(0, "f")
    text = '<tool_call>{"name": "f", "arguments": {}}} so'
    assert parsed(QwenToolParser, TOOLS, text)[-1] == TextDelta("} so")


def test_a_call_inside_reasoning_is_reasoning() -> None:
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    found = parsed(both, TOOLS, f"<think>{call}</think>\n\n{call}")
    assert found == [ReasoningDelta(call), ToolCallBegun(0, "f"), ToolCallDelta(0, "{}"), ToolCallEnded(0)]


def test_thoughts_are_shown_at_once() -> None:
    parser = ThinkParser(ParserContext(prompt="...<think>\n"))
    assert list(parser.feed("Hm")) == [ReasoningDelta("Hm")]
    assert list(parser.feed(" </t")) == [ReasoningDelta(" ")]
    assert list(parser.finish()) == [ReasoningDelta("</t")]


PIECES = st.sampled_from(
    [
        *("<think>", "</think>", "<tool_call>", "</tool_call>", "<", "</", "\n", " ", "a", "é"),
        *("{", "}", "[", '"', "\\", ", ", '"name": "f"', '"arguments": {}', '{"name": "no"'),
        *('{"name": "f", "arguments": ', '{"a": [1, "}"]}', '\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>\n'),
    ]
)


def visible(events: list[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, TextDelta))


@settings(max_examples=200, deadline=None)
@given(st.lists(PIECES, max_size=14).map("".join), st.lists(st.integers(0, 200), max_size=5), st.booleans())
def test_any_cutting_gives_the_same_events(text: str, cuts: list[int], inside: bool) -> None:
    context = ParserContext(tools=TOOLS.tools, prompt="<think>" if inside else "")
    for make in (QwenToolParser, ThinkParser, both):
        whole = parsed(make, context, [text])
        assert parsed(make, context, text) == whole
        ends = sorted(min(cut, len(text)) for cut in cuts)
        assert parsed(make, context, [text[a:b] for a, b in zip([0, *ends], [*ends, len(text)], strict=True)]) == whole
    calls = parsed(QwenToolParser, context, text)
    if not any(isinstance(event, ToolCallBegun) for event in calls):
        assert visible(calls) == text


@settings(max_examples=40)
@given(st.recursive(st.text(max_size=4) | st.integers(), lambda x: st.lists(x) | st.dictionaries(st.text(), x)))
def test_brackets_find_the_end_of_any_object(value: object) -> None:
    text = json.dumps({"a": value})
    assert Brackets().end(text + "}") == len(text)
    brackets = Brackets()
    assert [brackets.end(char) for char in text] == [None] * (len(text) - 1) + [1]
