"""Sources of tokenizers: which files each recognises, and what transformers converts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from llmcore.api.errors import ConfigError
from llmcore.builtin.tokenizers import convert, has_tokenizer_files, register_tokenizers
from llmcore.registry.loader import load
from tokenizers import Tokenizer
from transformers import BertTokenizer

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "hello", "world", "##s"]


@pytest.fixture
def bert(tmp_path: Path) -> Path:
    """A model that has a vocabulary and no tokenizer.json."""
    model = tmp_path / "bert"
    model.mkdir()
    (model / "vocab.txt").write_text("\n".join(WORDS))
    (model / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "BertTokenizer"}))
    (model / "config.json").write_text(json.dumps({"model_type": "bert"}))
    (model / "generation_config.json").write_text(json.dumps({"top_k": 3}))
    return model


@pytest.mark.parametrize(
    ("file", "sources"),
    [
        ("tokenizer.json", {"tokenizers"}),
        ("tokenizer.model", {"transformers"}),
        ("vocab.txt", {"transformers"}),
        ("config.json", set()),
    ],
)
def test_each_source_recognises_its_files(file: str, sources: set[str], tmp_path: Path) -> None:
    (tmp_path / file).write_text("{}")
    assert {spec.name for spec in register_tokenizers() if load(spec.sniff)(tmp_path)} == sources


def test_a_conversion_has_the_same_tokens_and_the_models_configs(bert: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    assert has_tokenizer_files(bert)
    convert(bert, out)
    text = "Hello worlds hello"
    ours = Tokenizer.from_file(str(out / "tokenizer.json")).encode(text).ids
    assert ours == BertTokenizer.from_pretrained(bert)(text)["input_ids"] == [2, 5, 6, 7, 5, 3]
    assert json.loads((out / "generation_config.json").read_text()) == {"top_k": 3}
    assert json.loads((out / "config.json").read_text()) == {"model_type": "bert"}


def test_what_transformers_cannot_build_is_a_config_error(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "NoSuchTokenizer"}))
    with pytest.raises(ConfigError, match="transformers cannot build it"):
        convert(tmp_path, tmp_path)
