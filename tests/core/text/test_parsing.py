"""The interface of output parsers: where an answer begins, tags that arrive in pieces, Lark strings."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from llmcore.text.parsing import ParserContext, before_tag, held_back, lark_string


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


def test_a_lark_string_is_quoted() -> None:
    assert lark_string('say "é"\n') == '"say \\"é\\"\\n"'
