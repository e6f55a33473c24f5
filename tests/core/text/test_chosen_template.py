from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from llmcore.api.errors import ConfigError, RequestError
from llmcore.api.specs import OutputParserSpec
from llmcore.text.chosen_template import ChosenTemplate, Templated, choose_template
from llmcore.text.tokenizer import load_tokenizer
from llmcore_devtools.tokenizer import write_tokenizer

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


def rendered(chosen: ChosenTemplate, messages: list[dict[str, str]], tmp_path: Path, **variables: Any) -> str:
    inner = load_tokenizer(write_tokenizer(tmp_path))
    return Templated(inner, chosen, {"bos_token": "<bos>"}).chat(messages, **variables)


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
def test_lmdeploys_fields(turns: list[tuple[str, str]], text: str, tmp_path: Path) -> None:
    chosen = choose_template(json.dumps(FRAMES))
    assert chosen.stop_words == ("</a>",)
    assert rendered(chosen, said(*turns), tmp_path) == text


def test_a_json_file_is_the_same_as_its_text(tmp_path: Path) -> None:
    (tmp_path / "frames.json").write_text(json.dumps(FRAMES))
    assert choose_template(str(tmp_path / "frames.json")) == choose_template(json.dumps(FRAMES))


def test_without_an_instruction(tmp_path: Path) -> None:
    absent = {name: text for name, text in FRAMES.items() if name != "meta_instruction"}
    assert rendered(choose_template(json.dumps(absent)), said(("user", "x")), tmp_path).startswith("<s></s>\n<u>")
    null = {**FRAMES, "meta_instruction": None}
    assert rendered(choose_template(json.dumps(null)), said(("user", "x")), tmp_path).startswith("<u>")


def test_a_jinja_file(tmp_path: Path) -> None:
    file = tmp_path / "chat.jinja"
    file.write_text("{{ bos_token }}{% for m in messages %}{{ m.role }}={{ m.content }};{% endfor %}")
    assert rendered(choose_template(str(file)), said(("user", "x")), tmp_path) == "<bos>user=x;"


def test_everything_else_is_the_tokenizers(tmp_path: Path) -> None:
    inner = load_tokenizer(write_tokenizer(tmp_path))
    outer = Templated(inner, ChosenTemplate("x"), {})
    assert outer.encode("ab") == inner.encode("ab")
    assert outer.vocab_size == inner.vocab_size


def test_roles_that_have_no_place_are_refused(tmp_path: Path) -> None:
    chosen = choose_template(json.dumps(FRAMES))
    with pytest.raises(RequestError, match="knows no role developer"):
        rendered(chosen, said(("developer", "x")), tmp_path)


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


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{% if %}", "--chat_template cannot be compiled"),
        ("{{ messages[0].x.y }}", "--chat_template: .*no attribute"),
        ("{{ 'x' * 10 ** 10 }}", "--chat_template: for one word it takes more than 16 MB of memory"),
    ],
)
def test_a_template_that_cannot_render_is_found_at_the_start(source: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "t.jinja").write_text(source)
    with pytest.raises(ConfigError, match=message):
        choose_template(str(tmp_path / "t.jinja"))


def test_a_template_may_refuse_the_trial(tmp_path: Path) -> None:
    (tmp_path / "t.jinja").write_text("{{ raise_exception('say more') }}")
    choose_template(str(tmp_path / "t.jinja"))


NAMED = ChosenTemplate("{{ messages[0].content }} by name", stop_words=("<end>",))
SPECS = [
    OutputParserSpec(name="mine", kind="tool", make="x:y", template=f"{__name__}:NAMED"),
    OutputParserSpec(name="plain", kind="tool", make="x:y"),
]


def test_a_parser_s_template_by_its_name(tmp_path: Path) -> None:
    chosen = choose_template("mine", SPECS)
    assert (chosen.stop_words, rendered(chosen, said(("user", "x")), tmp_path)) == (("<end>",), "x by name")
    with pytest.raises(
        ConfigError, match=r"--chat_template mins: .*give one of mine, a Jinja file.*Did you mean mine"
    ):
        choose_template("mins", SPECS)
    with pytest.raises(ConfigError, match="--chat_template plain: No such file"):
        choose_template("plain", SPECS)


def test_a_client_cannot_set_what_the_template_is_made_with(tmp_path: Path) -> None:
    chosen = choose_template(json.dumps(FRAMES))
    assert rendered(chosen, said(("user", "x")), tmp_path, frame={}) == rendered(chosen, said(("user", "x")), tmp_path)


def test_a_name_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        choose_template(json.dumps({**FRAMES, "model_name": "mine"}))
    assert "model_name has no effect" in caplog.text
