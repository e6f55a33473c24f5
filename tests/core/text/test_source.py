from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from llmcore.api.errors import ConfigError
from llmcore.api.specs import TokenizerSpec
from llmcore.builtin.tokenizers import register_tokenizers
from llmcore.config import Model
from llmcore.text import source
from llmcore.text.templates import ChatTemplate
from llmcore.text.tokenizer import FastTokenizer, load_tokenizer
from llmcore_devtools.tokenizer import write_tokenizer

BUILTIN = list(register_tokenizers())


def copying_converter(model: Path, out: Path) -> None:
    """A converter as a plugin would bring it: the model is one file that names its tokenizer."""
    write_tokenizer(out)
    (out / "converted_from").write_text(model.read_text())


def failing_converter(model: Path, out: Path) -> None:
    raise ConfigError("this file is odd")


def crashing_converter(model: Path, out: Path) -> None:
    raise ZeroDivisionError("oops")


def lazy_converter(model: Path, out: Path, trust_remote_code: bool = False) -> None:
    (out / "trusted").write_text(str(trust_remote_code))


def is_odd(model: Path) -> bool:
    return model.suffix == ".odd"


@pytest.fixture
def importable(monkeypatch: pytest.MonkeyPatch) -> str:
    """The name under which this and a child process find this file."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    return Path(__file__).stem


def test_tokenizer_json_is_taken_as_it_is(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    assert source.prepare(BUILTIN, Model(), tmp_path, tmp_path / "out") == tmp_path
    assert isinstance(source.open_tokenizer(BUILTIN, tmp_path, "auto"), FastTokenizer)
    assert not (tmp_path / "out").exists()


def test_slow_without_a_slow_one_warns(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_tokenizer(tmp_path)
    with caplog.at_level(logging.WARNING):
        assert source.choose(BUILTIN, tmp_path, "slow").name == "tokenizers"
    assert "has no slow tokenizer; 'tokenizers' is used" in caplog.text


def test_slow_is_chosen_where_there_is_one(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"")
    slow = TokenizerSpec(name="mine", sniff=BUILTIN[0].sniff, load=BUILTIN[0].load, mode="slow")
    assert source.choose([*BUILTIN, slow], tmp_path, "slow").name == "mine"
    assert source.choose([*BUILTIN, slow], tmp_path, "fast").name == "tokenizers"


def test_without_a_plugin_slow_is_an_error_that_names_one(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"reads tokenizer\.model: pip install plugin-sentencepiece"):
        source.choose(BUILTIN, tmp_path, "slow")


def test_a_directory_without_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no tokenizer found .* \(known: tokenizers, transformers\)"):
        source.choose(BUILTIN, tmp_path, "fast")


def test_dummy_weights_want_no_tokenizer_of_their_own(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, out, dummy = tmp_path / "model", tmp_path / "out", Model(load_format="dummy")
    model.mkdir()
    with pytest.raises(ConfigError, match="no tokenizer found"):
        source.prepare(BUILTIN, Model(), model, out)
    assert source.prepare(BUILTIN, dummy, model, out) == out
    assert "model has no tokenizer; one id per byte stands in for it" in caplog.text
    tokenizer = source.open_tokenizer(BUILTIN, out, "fast")
    ids = tokenizer.encode("né 👋")
    assert (len(ids), max(ids) < 256, tokenizer.decode(ids)) == (8, True, "né 👋")
    assert "hi" in tokenizer.chat([{"role": "user", "content": "hi"}], add_generation_prompt=True)
    write_tokenizer(model)
    assert source.prepare(BUILTIN, dummy, model, out) == model


def test_priority_decides(tmp_path: Path) -> None:
    better = TokenizerSpec(name="better", sniff=BUILTIN[0].sniff, load=BUILTIN[0].load, priority=60)
    write_tokenizer(tmp_path)
    assert source.choose([*BUILTIN, better], tmp_path, "fast").name == "better"


def test_a_conversion_in_a_child(tmp_path: Path, importable: str) -> None:
    model = tmp_path / "model.odd"
    model.write_text("content")
    odd = TokenizerSpec(name="odd", sniff=f"{importable}:is_odd", convert=f"{importable}:copying_converter")
    out = source.prepare([*BUILTIN, odd], Model(), model, tmp_path / "out")
    assert out == tmp_path / "out"
    assert (out / "converted_from").read_text() == "content"
    assert isinstance(source.open_tokenizer(BUILTIN, out, "fast"), FastTokenizer)


@pytest.mark.parametrize(
    ("converter", "message"),
    [
        ("failing_converter", "cannot be converted: this file is odd"),
        ("crashing_converter", "cannot be converted: ZeroDivisionError: oops"),
        ("missing_converter", "cannot be converted: .*missing_converter"),
        ("lazy_converter", "wrote no tokenizer.json"),
    ],
)
def test_what_goes_wrong_in_a_child_is_a_startup_error(
    tmp_path: Path, importable: str, converter: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        source.convert(f"{importable}:{converter}", tmp_path / "model.odd", tmp_path / "out", trust_remote_code=True)
    if converter == "lazy_converter":
        assert (tmp_path / "out" / "trusted").read_text() == "True"


def test_transformers_converts_what_it_can(tmp_path: Path) -> None:
    vocabulary = ["[UNK]", "[CLS]", "[SEP]", "[PAD]", "[MASK]", "hello", "wor", "##ld"]
    model = tmp_path / "model"
    model.mkdir()
    (model / "vocab.txt").write_text("\n".join(vocabulary))
    (model / "tokenizer_config.json").write_text('{"tokenizer_class": "BertTokenizer"}')
    (model / "config.json").write_text('{"model_type": "bert", "eos_token_id": 2}')
    out = source.prepare(BUILTIN, Model(), model, tmp_path / "out")
    tokenizer = source.open_tokenizer(BUILTIN, out, "fast")
    assert tokenizer.encode("hello world", add_special_tokens=False) == [5, 6, 7]
    assert tokenizer.eos_ids == (2,)


def test_another_template_for_a_tokenizer(tmp_path: Path) -> None:
    inner = load_tokenizer(write_tokenizer(tmp_path))
    outer: Any = source.Templated(inner, ChatTemplate({"default": "{{ messages[0].content }}!"}), ["<end>"])
    assert (outer.chat([{"role": "user", "content": "Héllo"}]), outer.stop_words) == ("Héllo!", ["<end>"])
    assert outer.encode("ab") == inner.encode("ab")
    assert outer.vocab_size == inner.vocab_size
