"""Which parsers a server gets: what its options say, else what recognises the chat template."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from llmcore.api.errors import ConfigError
from llmcore.api.specs import OutputParserSpec, TemplateMarks
from llmcore.config import Model
from llmcore.text.parsing import OutputParser, ParserContext
from llmcore.text.tokenizer import load_tokenizer
from llmcore_devtools.tokenizer import write_tokenizer
from llmcore_server.chat.parser_choice import chat_templates, check_parsers, choose_parsers, open_parsers


def spec(name: str, kind: Any = "tool", *marks: TemplateMarks, priority: int = 50) -> OutputParserSpec:
    return OutputParserSpec(name=name, kind=kind, make=f"{__name__}:silent", recognises=marks, priority=priority)


CALLS = TemplateMarks(texts=("<call>", "json"))
SPECS = (
    spec("b", "tool", CALLS),
    spec("a", "tool", TemplateMarks(texts=("<call>",), without=("json",)), TemplateMarks(texts=("[CALL]",))),
    spec("alias", "tool"),
    spec("think", "reasoning", TemplateMarks(texts=("<think>",))),
)


def names(template: str, specs: tuple[OutputParserSpec, ...] = SPECS, **options: Any) -> tuple[str | None, str | None]:
    chosen = choose_parsers(specs, Model(**options), [template, ""]).specs
    return tuple(None if found is None else found.name for found in (chosen["tool"], chosen["reasoning"]))  # type: ignore[return-value]


@pytest.mark.parametrize("option", [None, "auto"])
def test_the_chat_template_chooses(option: str | None) -> None:
    options = {"tool_call_parser": option, "reasoning_parser": option}
    assert names("<call> json", **options) == ("b", None)
    assert names("<call>", **options) == ("a", None)
    assert names("json [CALL] <think>", **options) == ("a", "think")
    assert names("", **options) == (None, None)


def test_options_win() -> None:
    assert names("<call> <think>", tool_call_parser="alias", reasoning_parser="none") == ("alias", None)
    assert names("<call> <think>", tool_call_parser="none") == (None, "think")
    with pytest.raises(ConfigError, match="known: a, alias, b"):
        names("<call>", tool_call_parser="c")


def test_of_several_the_highest_priority_then_the_first_name() -> None:
    more = (spec("c", "tool", CALLS), spec("z", "tool", CALLS, priority=60))
    assert names("<call> json", more[:1] + SPECS)[0] == "b"
    assert names("<call> json", more + SPECS)[0] == "z"


def test_what_the_summary_says_and_workers_get() -> None:
    choice = choose_parsers(SPECS, Model(reasoning_parser="none"), ["<call>"])
    assert choice.rows() == (
        ("tool calls", "a (by the chat template)"),
        ("reasoning", "not read (--reasoning_parser)"),
    )
    model = choice.named(Model(model_dir="m"))
    assert (model.tool_call_parser, model.reasoning_parser, model.model_dir) == ("a", "none", "m")
    assert dict(choose_parsers((), Model(), []).rows())["reasoning"].startswith("not read (no parser recognises")


def test_the_operators_template_counts_alone(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}<call>")
    assert chat_templates(SPECS, Model(), tmp_path) == ("{{ messages }}<call>",)
    (tmp_path / "mine.jinja").write_text("<think>{{ messages }}")
    mine = Model(chat_template=str(tmp_path / "mine.jinja"))
    assert chat_templates(SPECS, mine, tmp_path) == ("<think>{{ messages }}",)


@pytest.mark.parametrize("name", ["auto", "none"])
def test_words_of_the_options_are_no_names(name: str) -> None:
    with pytest.raises(ValueError, match="meaning of its own"):
        spec(name)


def silent(context: ParserContext) -> OutputParser:
    """A parser that no test of this file calls."""
    raise NotImplementedError


NAMED = (spec("upper", "reasoning"), spec("same", "reasoning"), spec("same", "tool"))


def test_names_are_looked_up_by_kind(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_tokenizer(tmp_path))
    none = open_parsers(NAMED, Model(), tokenizer)
    assert (none.tool, none.reasoning, none.tool_names) == (None, None, ("same",))
    found = open_parsers(NAMED, Model(tool_call_parser="same", reasoning_parser="same"), tokenizer)
    assert found.tool is not None and found.tool.spec.kind == "tool"
    assert found.reasoning is not None and found.reasoning.spec.kind == "reasoning"


def test_an_unknown_name_lists_those_there_are() -> None:
    with pytest.raises(ConfigError, match=r"--tool_call_parser: there is no tool parser 'upper'; known: same\."):
        check_parsers(NAMED, Model(tool_call_parser="upper"))
    with pytest.raises(ConfigError, match=r"'uper'; known: same, upper\. Did you mean upper"):
        check_parsers(NAMED, Model(reasoning_parser="uper"))
    with pytest.raises(ConfigError, match="known: none; plugin-parsers brings some"):
        check_parsers((), Model(tool_call_parser="x"))
