"""Output parsers: which ones a server has, how two compose, and the special tokens that they must see."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from llmcore.api.errors import ConfigError
from llmcore.api.specs import OutputParserSpec
from llmcore.config import Model
from llmcore.text.detokenizer import WindowDetokenizer, detokenizer
from llmcore.text.events import (
    Event,
    ReasoningDelta,
    TextDelta,
    ToolCallBegun,
    ToolCallDelta,
    ToolCallEnded,
    joined,
)
from llmcore.text.parser_choice import check_parsers
from llmcore.text.parsing import Chained, ParserContext, open_parsers
from llmcore.text.tags import before_tag, held_back
from llmcore.text.tokenizer import FastTokenizer, load_tokenizer
from llmcore_devtools.tokenizer import BOS, PAD, write_sentencepiece_like, write_tokenizer


class Upper:
    """Capitals are reasoning."""

    def __init__(self, context: ParserContext):
        self.context = context

    def feed(self, text: str) -> Iterable[Event]:
        return [ReasoningDelta(c) if c.isupper() else TextDelta(c) for c in text]

    def finish(self) -> Iterable[Event]:
        return [TextDelta("!")]


class Digits:
    """Digits are calls; what is held comes at the end."""

    def __init__(self, context: ParserContext):
        self.held = ""

    def feed(self, text: str) -> Iterable[Event]:
        self.held += text
        return [ToolCallBegun(int(c), c) for c in text if c.isdigit()]

    def finish(self) -> Iterable[Event]:
        return [TextDelta(self.held)]


def spec(name: str, kind: Any, make: str = "Upper", **more: Any) -> OutputParserSpec:
    return OutputParserSpec(name=name, kind=kind, make=f"{__name__}:{make}", **more)


SPECS = (spec("upper", "reasoning"), spec("same", "reasoning"), spec("same", "tool", "Digits"))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> FastTokenizer:
    return load_tokenizer(write_tokenizer(tmp_path_factory.mktemp("tokenizer")))


def test_names_are_looked_up_by_kind(tokenizer: FastTokenizer) -> None:
    none = open_parsers(SPECS, Model(), tokenizer)
    assert (none.tool, none.reasoning, none.tool_names) == (None, None, ("same",))
    found = open_parsers(SPECS, Model(tool_call_parser="same", reasoning_parser="same"), tokenizer)
    assert found.tool is not None and found.tool.make is Digits
    assert found.reasoning is not None and found.reasoning.make is Upper


def test_an_unknown_name_lists_those_there_are() -> None:
    with pytest.raises(ConfigError, match=r"--tool_call_parser: there is no tool parser 'upper'; known: same\."):
        check_parsers(SPECS, Model(tool_call_parser="upper"))
    with pytest.raises(ConfigError, match=r"'uper'; known: same, upper\. Did you mean upper"):
        check_parsers(SPECS, Model(reasoning_parser="uper"))
    with pytest.raises(ConfigError, match="known: none; plugin-parsers brings some"):
        check_parsers((), Model(tool_call_parser="x"))


def test_a_request_without_tools_has_no_tool_parser(tokenizer: FastTokenizer) -> None:
    tool = open_parsers(SPECS, Model(tool_call_parser="same"), tokenizer)
    assert tool.bind(ParserContext()) is None
    both = open_parsers(SPECS, Model(tool_call_parser="same", reasoning_parser="upper"), tokenizer)
    bound = both.bind(ParserContext())
    assert bound is not None and isinstance(bound.make(), Upper)
    bound = both.bind(ParserContext(tools={"f": {}}))
    assert bound is not None and isinstance(bound.make(), Chained)
    assert bound.make() is not bound.make()


def test_the_tool_parser_gets_what_reasoning_leaves() -> None:
    parser = Chained(Upper(ParserContext()), Digits(ParserContext()))
    assert list(parser.feed("A1b")) == [ReasoningDelta("A"), ToolCallBegun(1, "1")]
    assert list(parser.finish()) == [TextDelta("1b!")]


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


# --- special tokens ----------------------------------------------------------------------------------------------


def test_a_parser_names_the_special_tokens_it_reads(tokenizer: FastTokenizer) -> None:
    texts = ("<|im_start|>", "not special", "<|endoftext|>", "a")
    parsers = (spec("s", "tool", special_tokens=texts), spec("r", "reasoning", special_tokens=("<|im_end|>",)))
    found = open_parsers(parsers, Model(tool_call_parser="s", reasoning_parser="r"), tokenizer)
    assert found.tool is not None and found.tool.special_ids == {BOS, PAD}
    bound = found.bind(ParserContext(tools={"f": {}}))
    assert bound is not None and bound.special_ids == {BOS, BOS + 1, PAD}


@pytest.mark.parametrize("window", [False, True])
def test_kept_special_tokens_have_their_text(tokenizer: FastTokenizer, window: bool) -> None:
    ids = tokenizer.encode("a<|endoftext|>é<|im_start|>b")
    keep = frozenset({PAD})
    make = WindowDetokenizer(tokenizer, True, keep) if window else detokenizer(tokenizer, keep=keep)
    assert "".join(map(make.add, ids)) + make.flush() == "a<|endoftext|>éb"
    plain = WindowDetokenizer(tokenizer, True) if window else detokenizer(tokenizer)
    assert "".join(map(plain.add, ids)) + plain.flush() == "aéb"
    every = detokenizer(tokenizer, skip_special_tokens=False, keep=keep)
    assert "".join(map(every.add, ids)) == "a<|endoftext|>é<|im_start|>b"


def test_kept_special_tokens_of_a_sentencepiece_vocabulary(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_sentencepiece_like(tmp_path))
    ids = [tokenizer.encode("<s>", add_special_tokens=False)[0], *tokenizer.encode(" a"), 2]
    make = detokenizer(tokenizer, keep=frozenset(ids[:1]))
    assert "".join(map(make.add, ids)).replace(" ", "") == "<s>a"
