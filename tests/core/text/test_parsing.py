"""The interface of output parsers: where an answer begins, tags that arrive in pieces, grammars of calls."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from llmcore.text.parsing import CallGrammar, ParserContext, before_tag, held_back, lark_string


@pytest.mark.parametrize(
    ("prompt", "continued", "inside"),
    [
        ("Hi\n<think>\n", "", True),
        ("Hi\n<think>\n\n</think>\n", "", False),
        ("<think> in another message\nHi", "", None),
        ("Hi <think>so", " <think>so", True),
        ("Hi <think>so</think> a", "<think>so</think> a", False),
        ("Hi a", "a", False),
    ],
)
def test_the_prompt_shows_whether_the_answer_begins_inside_reasoning(
    prompt: str, continued: str, inside: bool | None
) -> None:
    assert ParserContext(prompt=prompt, continued=continued).thinking("<think>", "</think>") is inside


def test_before_a_tag() -> None:
    assert before_tag("ab<t>c<t>", "<t>") == ("ab", "c<t>")
    assert before_tag("ab<t", "<t>") == ("ab", None)
    assert before_tag("ab<<", "<t>") == ("ab<", None)
    assert held_back("aab", "aabaabx") == 3


@given(st.text("<ta", max_size=12), st.sampled_from(["<t>", "<<a", "aa", "<"]))
def test_what_is_held_back_is_the_longest_beginning(text: str, tag: str) -> None:
    before, after = before_tag(text, tag)
    if tag in text:
        assert (before, after) == (text[: text.index(tag)], text[text.index(tag) + len(tag) :])
        return
    ends = [text[i:] for i in range(len(text) + 1) if tag.startswith(text[i:])]
    assert (after, text[len(before) :]) == (None, ends[0])


TOOLS = {"add": {"parameters": {"properties": {"a": {}}}, "strict": True}, "now": {}}


@pytest.mark.parametrize(
    ("bare", "single", "start"),
    [
        (False, True, "start: call one"),
        (False, False, "start: call many"),
        (True, True, "start: call? one"),
    ],
)
def test_a_forced_answer_consists_of_calls(bare: bool, single: bool, start: str) -> None:
    grammar = CallGrammar(rules="one: args_0 | args_1", opener="call", tags={"call": "<call>"}, bare=bare)
    made = grammar.forced(TOOLS, single=single)
    assert made["lark"].splitlines() == [start, "one: args_0 | args_1"] and made["tags"] == {"call": "<call>"}
    schemas = made["schemas"]
    assert json.loads(schemas["args_0"]["schema"]) == {"type": "object", "properties": {"a": {}}}
    assert [schemas[name]["strict"] for name in ("args_0", "args_1")] == [True, False]
    assert schemas["args_1"]["of"] == "the parameters of 'now'"


def test_a_free_answer_may_have_text_around_its_calls() -> None:
    grammar = CallGrammar(rules="one: args_0", opener="call")
    assert grammar.free(TOOLS, single=True)["lark"].startswith("start: rest | before_call one\n")
    assert grammar.free(TOOLS, single=False)["lark"].startswith("start: rest | (before_call many)+ rest\n")


def test_a_lark_string_is_quoted() -> None:
    assert lark_string('say "é"\n') == '"say \\"é\\"\\n"'
