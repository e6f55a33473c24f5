"""`--tokenizer_mode slow`: ids and text of a SentencePiece model, its added tokens, its choice and its errors."""

from __future__ import annotations

import io
from pathlib import Path

import orjson
import pytest
from llmcore.api import ConfigError, RequestError, TokenizerSpec
from llmcore.config import Model
from llmcore.text.source import choose, open_tokenizer, prepare
from llmcore.text.tokenizer import detokenizer
from llmcore_devtools import check_plugin, registry_of
from llmcore_sentencepiece.tokenizer import SentencePieceTokenizer, load_tokenizer
from sentencepiece import SentencePieceProcessor, SentencePieceTrainer

TEXTS = ["hello there world", "  two  spaces", "unseen: é😀", "a\nb", ""]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model's tokenizer.model, and its companions."""
    directory = tmp_path_factory.mktemp("slow")
    model = io.BytesIO()
    SentencePieceTrainer.train(
        sentence_iterator=iter(["hello there world", "the other world says hello"] * 20),
        model_writer=model,
        vocab_size=300,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    (directory / "tokenizer.model").write_bytes(model.getvalue())
    size = SentencePieceProcessor(model_proto=model.getvalue()).get_piece_size()
    settings = {
        "added_tokens_decoder": {str(size): {"content": "<|end|>"}},
        "eos_token": "<|end|>",
        "chat_template": "{{ messages[0].content }}<|end|>",
    }
    (directory / "tokenizer_config.json").write_bytes(orjson.dumps(settings))
    return directory


@pytest.fixture(scope="module")
def tokenizer(directory: Path) -> SentencePieceTokenizer:
    return load_tokenizer(directory)


def test_the_plugin_serves_the_mode_slow(directory: Path) -> None:
    registry = registry_of("sentencepiece")
    assert check_plugin(registry, "sentencepiece", [directory]) == {"register_tokenizers": 1}
    specs = [spec for spec, _ in registry.specs(TokenizerSpec)]
    opened = open_tokenizer(specs, prepare(specs, Model(tokenizer_mode="slow"), directory, directory / "out"), "slow")
    assert isinstance(opened, SentencePieceTokenizer) and not (directory / "out").exists()
    assert choose(specs, directory, "fast").name == "transformers"


@pytest.mark.parametrize("text", TEXTS)
def test_text_comes_back(tokenizer: SentencePieceTokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert ids[0] == 1
    assert tokenizer.decode(ids) == text
    state = detokenizer(tokenizer)
    assert "".join([*map(state.add, ids), state.flush()]) == text


def test_added_tokens(tokenizer: SentencePieceTokenizer) -> None:
    [end] = tokenizer.eos_ids
    ids = tokenizer.encode("hello<|end|>world", add_special_tokens=False)
    assert ids.count(end) == 1
    assert end in tokenizer.special_ids
    assert tokenizer.token(end) == "<|end|>"
    assert "<|end|>" in tokenizer.decode(ids, skip_special_tokens=False)
    assert "<|end|>" not in tokenizer.decode(ids)
    assert tokenizer.encode(tokenizer.chat([{"role": "user", "content": "hello"}]))[-1] == end


def test_bytes(tokenizer: SentencePieceTokenizer) -> None:
    ids = tokenizer.encode("é😀", add_special_tokens=False)
    assert b"".join(map(tokenizer.token_bytes, ids)).decode().strip() == "é😀"


def test_ids_outside_the_vocabulary(tokenizer: SentencePieceTokenizer) -> None:
    for token_id in (-1, tokenizer.vocab_size):
        with pytest.raises(RequestError, match="vocabulary"):
            tokenizer.decode([token_id])


def test_a_broken_file(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"broken")
    with pytest.raises(ConfigError, match=r"tokenizer\.model cannot be loaded"):
        load_tokenizer(tmp_path)
