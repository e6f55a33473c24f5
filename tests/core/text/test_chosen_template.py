from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from llmcore.api.errors import ConfigError, RequestError
from llmcore.api.specs import OutputParserSpec
from llmcore.text.chosen_template import ChosenTemplate, choose_template

FRAMES = {
    "system": "<s>",
    "meta_instruction": "Be kind.",
    "eosys": "</s>\n",
    "user": "<u>",
    "eoh": "</u>\n",
    "assistant": "<a>",
    "eoa": "</a>",
    "separator": "\n",
    "tool": "<t>",
    "eotool": "</t>\n",
    "stop_words": ["</a>"],
}


def said(*turns: tuple[str, str]) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in turns]


def rendered(chosen: ChosenTemplate, messages: list[dict[str, str]], **variables: Any) -> str:
    return chosen.with_tokens({"bos_token": "<bos>"}).render(messages, **variables)


@pytest.mark.parametrize(
    ("turns", "text"),
    [
        ([("user", "Hi")], "<s>Be kind.</s>\n<u>Hi</u>\n<a>"),
        ([("system", "S"), ("user", "Hi")], "<s>S</s>\n<u>Hi</u>\n<a>"),
        (
            [("user", "1"), ("assistant", "2"), ("user", "3")],
            "<s>Be kind.</s>\n<u>1</u>\n<a>2</a>\n<u>3</u>\n<a>",
        ),
        ([("system", "S"), ("user", "1"), ("assistant", "2")], "<s>S</s>\n<u>1</u>\n<a>2"),
        ([("system", "S"), ("tool", "1")], "<s>S</s>\n<t>1</t>\n<a>"),
    ],
)
def test_lmdeploys_fields(turns: list[tuple[str, str]], text: str) -> None:
    chosen = choose_template(json.dumps(FRAMES))
    assert chosen.stop_words == ("</a>",)
    assert rendered(chosen, said(*turns)) == text


def test_a_json_file_is_the_same_as_its_text(tmp_path: Path) -> None:
    (tmp_path / "frames.json").write_text(json.dumps(FRAMES))
    assert choose_template(str(tmp_path / "frames.json")) == choose_template(json.dumps(FRAMES))


def test_without_an_instruction() -> None:
    absent = {name: text for name, text in FRAMES.items() if name != "meta_instruction"}
    assert rendered(choose_template(json.dumps(absent)), said(("user", "x"))).startswith("<s></s>\n<u>")
    null = {**FRAMES, "meta_instruction": None}
    assert rendered(choose_template(json.dumps(null)), said(("user", "x"))).startswith("<u>")


def test_a_jinja_file(tmp_path: Path) -> None:
    file = tmp_path / "chat.jinja"
    file.write_text("{{ bos_token }}{% for m in messages %}{{ m.role }}={{ m.content }};{% endfor %}")
    assert rendered(choose_template(str(file)), said(("user", "x"))) == "<bos>user=x;"


def test_roles_that_have_no_place_are_refused() -> None:
    chosen = choose_template(json.dumps(FRAMES))
    with pytest.raises(RequestError, match="knows no role developer"):
        rendered(chosen, said(("developer", "x")))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nowhere.jinja", "--chat_template nowhere.jinja: No such file or directory; give a Jinja file"),
        ("{", "--chat_template: .*its fields are model_name, system"),
        ('{"sytem": "x"}', "--chat_template: .*sytem.*its fields are"),
        ('{"user": 1}', "--chat_template: .*user"),
        ('{"user": "x", "capability": "infilling"}', "capability 'infilling' is not known"),
        ('{"model_name": "vicuna"}', "no built-in templates"),
    ],
)
def test_errors_name_the_fix(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        choose_template(text)


NAMED = ChosenTemplate("{{ messages[0].content }} by name", stop_words=("<end>",))
SPECS = [
    OutputParserSpec(name="mine", kind="tool", make="x:y", template=f"{__name__}:NAMED"),
    OutputParserSpec(name="plain", kind="tool", make="x:y"),
]


def test_a_parser_s_template_by_its_name() -> None:
    chosen = choose_template("mine", SPECS)
    assert (chosen.stop_words, rendered(chosen, said(("user", "x")))) == (("<end>",), "x by name")
    with pytest.raises(
        ConfigError, match=r"--chat_template mins: .*give one of mine, a Jinja file.*Did you mean mine"
    ):
        choose_template("mins", SPECS)
    with pytest.raises(ConfigError, match="--chat_template plain: No such file"):
        choose_template("plain", SPECS)


def test_a_client_cannot_set_what_the_template_is_made_with() -> None:
    chosen = choose_template(json.dumps(FRAMES))
    assert rendered(chosen, said(("user", "x")), frame={}) == rendered(chosen, said(("user", "x")))


def test_a_name_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        choose_template(json.dumps({**FRAMES, "model_name": "mine"}))
    assert "model_name has no effect" in caplog.text
