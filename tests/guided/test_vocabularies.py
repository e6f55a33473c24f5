"""plugin-guided: vocabularies of every kind as llguidance needs them, and those that it cannot use."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llmcore.api import ProcessorContext
from llmcore.api.text import load_tokenizer
from llmcore_devtools.tokenizer import EOS
from llmcore_guided.processor import make


@pytest.mark.parametrize("eos", [(), (EOS,)])
def test_sentencepiece_vocabularies(tmp_path: Path, eos: tuple[int, ...]) -> None:
    tokenizer = load_tokenizer(sentencepiece_like(tmp_path))
    context = ProcessorContext(tokenizer.vocab_size + 5, eos, cache(lambda: tokenizer), stop_ids=eos)
    processor = make({"choice": ["Hello you", "Hellé"]}, context)(np.zeros(1, np.int32))
    words = processor.mask()
    bits = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist()
    assert [tokenizer.token(i) for i in bits] == ["<0x48>", "H", "Hell"]
    for piece, following in (
        ("Hell", {"<0x6F>", "o", "<0xC3>", "é"}),
        ("o", {"<0x20>", "▁", "▁you"}),
        ("▁you", set()),
    ):
        processor.accept(next(i for i in range(tokenizer.vocab_size) if tokenizer.token(i) == piece))
        if following:
            found = np.flatnonzero(np.unpackbits(processor.mask().view(np.uint8), bitorder="little")).tolist()
            assert {tokenizer.token(i) for i in found} == following
    assert processor.finished()


def sentencepiece_like(directory: Path) -> Path:
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "H", "Hell", "o", "é", "▁you"]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    for letter in "Hello you":
        vocabulary.setdefault(letter.replace(" ", "▁"), len(vocabulary))
    description: dict[str, Any] = {
        "version": "1.0",
        "added_tokens": [
            {"id": i, "content": pieces[i], "special": True, "single_word": False, "lstrip": False, "rstrip": False,
             "normalized": False}
            for i in range(3)
        ],
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                {"type": "Strip", "content": " ", "start": 1, "stop": 0},
            ],
        },
        "model": {"type": "BPE", "vocab": vocabulary, "merges": [], "byte_fallback": True, "unk_token": "<unk>"},
    }  # fmt: skip
    (directory / "tokenizer.json").write_text(json.dumps(description))
    return directory


def test_tokens_that_are_no_pieces_of_text_are_refused(tmp_path: Path) -> None:
    description: dict[str, Any] = {
        "version": "1.0", "added_tokens": [], "normalizer": None, "pre_tokenizer": None, "post_processor": None,
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
        "model": {"type": "WordPiece", "vocab": {"[UNK]": 0, "a": 1, "##b": 2}, "unk_token": "[UNK]",
                  "continuing_subword_prefix": "##", "max_input_chars_per_word": 100},
    }  # fmt: skip
    (tmp_path / "tokenizer.json").write_text(json.dumps(description))
    tokenizer = load_tokenizer(tmp_path)
    with pytest.raises(ValueError, match="no pieces of text"):
        make({"regex": "ab"}, ProcessorContext(3, (), cache(lambda: tokenizer)))
