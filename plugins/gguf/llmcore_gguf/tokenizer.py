"""The tokenizer of a GGUF file as tokenizer.json with its companions, so that a worker needs neither this nor gguf."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llmcore.api import ConfigError
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors

from llmcore_gguf.reader import CONTROL, GGUF, USER_DEFINED

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)


def _byte_level(*before: pre_tokenizers.PreTokenizer, regex: bool = True) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([*before, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=regex)])


PRE_TOKENIZERS: Mapping[str, Any] = {
    "default": _byte_level,
    "gpt-2": _byte_level,
    "smollm": lambda: _byte_level(pre_tokenizers.Digits(individual_digits=True)),
    "llama-bpe": lambda: _byte_level(pre_tokenizers.Split(Regex(_LLAMA3), "isolated"), regex=False),
}
"""How text is split before merging, by the file's tokenizer.ggml.pre."""


def convert(path: Path, out: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json, generation_config.json and chat_template.jinja to `out`."""
    file = GGUF(path)
    out.mkdir(parents=True, exist_ok=True)
    build(file).save(str(out / "tokenizer.json"))
    texts: list[str] = file.need("tokenizer.ggml.tokens")
    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    ids = {name: file.get(f"tokenizer.ggml.{key}_token_id") for name, key in names.items()}
    config = {name: texts[i] for name, i in ids.items() if i is not None}
    generation = {"bos_token_id": ids["bos_token"], "eos_token_id": file.end_ids(), "pad_token_id": ids["pad_token"]}
    _write(
        out / "tokenizer_config.json",
        {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **config},
    )
    _write(out / "generation_config.json", {key: value for key, value in generation.items() if value is not None})
    if (template := file.get("tokenizer.chat_template")) is not None:
        (out / "chat_template.jinja").write_text(template, encoding="utf-8")


def build(file: GGUF) -> Tokenizer:
    """The tokenizer; ConfigError for a kind that is not known."""
    model, pre = file.need("tokenizer.ggml.model"), file.get("tokenizer.ggml.pre", "default")
    if model != "gpt2" or pre not in PRE_TOKENIZERS:
        known = ", ".join(PRE_TOKENIZERS)
        raise ConfigError(
            f"{file.path} has a tokenizer of model {model!r}, pre {pre!r}; known: model 'gpt2' with pre {known}. "
            f"Use the model's safetensors directory with its tokenizer.json"
        )
    texts: list[str] = file.need("tokenizer.ggml.tokens")
    vocabulary = {text: i for i, text in enumerate(texts)}
    merges = [
        (left, right) for left, _, right in (merge.partition(" ") for merge in file.need("tokenizer.ggml.merges"))
    ]
    # Llama 3 looks whole words up before it merges
    bpe = models.BPE(vocab=vocabulary, merges=merges, ignore_merges=pre == "llama-bpe")
    tokenizer = Tokenizer(bpe)
    tokenizer.pre_tokenizer = PRE_TOKENIZERS[pre]()
    tokenizer.decoder = decoders.ByteLevel()
    kinds = file.get("tokenizer.ggml.token_type", [])
    for text, kind in zip(texts, kinds, strict=False):
        if kind in (CONTROL, USER_DEFINED):
            added = AddedToken(text, special=kind == CONTROL, normalized=False)
            (tokenizer.add_special_tokens if kind == CONTROL else tokenizer.add_tokens)([added])
    first = file.get("tokenizer.ggml.bos_token_id")
    if file.get("tokenizer.ggml.add_bos_token", False) and first is not None:
        text = texts[first]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{text} $A", pair=f"{text} $A $B", special_tokens=[(text, first)]
        )
    return tokenizer


def _write(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
