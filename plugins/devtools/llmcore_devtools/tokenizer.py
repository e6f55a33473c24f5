"""Small tokenizers for tests, written as the files of a model directory.

Ids of `write_tokenizer`: 0 to 255 are bytes. Then come the special tokens, then a few merges that cut words, spaces
and multi-byte characters in awkward places.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import orjson
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

SPECIAL = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
BOS, EOS, PAD = 256, 257, 258
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_MERGES = (
    *(("t", "h"), ("th", "e"), ("a", "n"), ("i", "n"), ("e", "r"), ("Ġ", "t"), ("Ġt", "h"), ("Ġth", "e")),
    *(("s", "t"), ("o", "p"), ("st", "op"), ("Ã", "©"), ("ð", "Ł"), ("ĺ", "Ģ"), ("â", "Ĥ"), ("Ġ", "âĤ")),
)
"""Pairs of byte-level strings; "Ã©" is é, "ðŁ" and "ĺĢ" the halves of an emoji, "âĤ" two thirds of a euro sign."""


def write_tokenizer(directory: Path, more: Sequence[str] = ()) -> Path:
    """A byte-level BPE tokenizer with a chat template, eos id and companions; returns `directory`.

    `more`: further texts that are one token each. They get the last ids.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {char: i for i, char in enumerate(alphabet)}
    for token in (*SPECIAL, *(left + right for left, right in _MERGES)):
        vocab[token] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=list(_MERGES)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in more])
    return _write(directory, tokenizer, TEMPLATE)


def write_sentencepiece_like(directory: Path) -> Path:
    """A tokenizer with SentencePiece's habits: "▁" for spaces, byte fallback, a dropped leading space."""
    tokens = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        "▁a",
        "▁b",
        "a",
        "b",
        "é",
        "▁▁",
    ]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: i for i, token in enumerate(tokens)},
            merges=[("▁", "a"), ("▁", "b"), ("▁", "▁")],
            unk_token="<unk>",
            byte_fallback=True,
        )
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in ("<s>", "</s>")])
    return _write(directory, tokenizer, None)


def _write(directory: Path, tokenizer: Tokenizer, template: str | None) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "tokenizer.json").write_text(tokenizer.to_str(), encoding="utf-8")
    names = {"eos_token": SPECIAL[1], "bos_token": SPECIAL[0]} if template else {"eos_token": "</s>"}
    (directory / "tokenizer_config.json").write_bytes(orjson.dumps(names))
    if template is not None:
        (directory / "chat_template.jinja").write_text(template, encoding="utf-8")
    return directory
