"""Writes the tokenizer of a GGUF file as tokenizer.json with its companions. A worker then needs neither this nor
gguf."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmcore.api import ConfigError
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from llmcore_gguf.reader import CONTROL, GGUF, NORMAL, USER_DEFINED

_DIGITS_BY = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{count}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Splits of the tokenizers that descend from GPT-4's. They differ in the digits that one token may hold."""


def _byte_level(*before: pre_tokenizers.PreTokenizer, regex: bool = True) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([*before, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=regex)])


def _split(count: str) -> Callable[[], pre_tokenizers.PreTokenizer]:
    pattern = _DIGITS_BY.format(count=count)
    return lambda: _byte_level(pre_tokenizers.Split(Regex(pattern), "isolated"), regex=False)


def _digits() -> pre_tokenizers.PreTokenizer:
    return _byte_level(pre_tokenizers.Digits(individual_digits=True))


@dataclass(frozen=True)
class Pre:
    """Preparation of text before merging."""

    split: Callable[[], pre_tokenizers.PreTokenizer]
    """Makes the pre-tokenizer that splits the text."""
    composed: bool = False
    """Characters are composed first (NFC)."""
    whole: bool = False
    """A word that is a token is not merged."""
    begins: bool = False
    """Texts begin with the first token, unless the file says otherwise."""


PRE: Mapping[str, Pre] = {
    "default": Pre(_byte_level),
    "gpt-2": Pre(_byte_level),
    "smollm": Pre(_digits),
    "starcoder": Pre(_digits),
    "refact": Pre(_digits),
    "command-r": Pre(_digits, composed=True),
    "llama-bpe": Pre(_split("{1,3}"), whole=True, begins=True),
    "dbrx": Pre(_split("{1,3}")),
    "qwen2": Pre(_split(""), composed=True),
}
"""By the file's `tokenizer.ggml.pre`. The names are of the models that had such a tokenizer first."""


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
    """Returns the tokenizer. Raises ConfigError for an unknown kind."""
    model, pre = file.need("tokenizer.ggml.model"), file.get("tokenizer.ggml.pre", "default")
    if model == "llama":
        tokenizer, begins = build_sentencepiece(file), True
    elif model == "gpt2" and pre in PRE:
        tokenizer, begins = _merging(file, PRE[pre]), PRE[pre].begins
    else:
        raise ConfigError(
            f"{file.path} has a tokenizer of model {model!r}, pre {pre!r}; known: model 'llama', and model 'gpt2' "
            f"with pre {', '.join(PRE)}. Use the model's safetensors directory with its tokenizer.json"
        )
    texts: list[str] = file.need("tokenizer.ggml.tokens")
    kinds = file.get("tokenizer.ggml.token_type", [])
    added = {kind: [i for i, each in enumerate(kinds) if each == kind] for kind in (CONTROL, USER_DEFINED)}
    tokenizer.add_special_tokens([AddedToken(texts[i], special=True, normalized=False) for i in added[CONTROL]])
    tokenizer.add_tokens([AddedToken(texts[i], normalized=False) for i in added[USER_DEFINED]])
    first = file.get("tokenizer.ggml.bos_token_id")
    if file.get("tokenizer.ggml.add_bos_token", begins) and first is not None:
        text = texts[first]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{text} $A", pair=f"{text} $A $B", special_tokens=[(text, first)]
        )
    return tokenizer


def _merging(file: GGUF, pre: Pre) -> Tokenizer:
    """Returns a byte-level BPE tokenizer."""
    vocabulary = {text: i for i, text in enumerate(file.need("tokenizer.ggml.tokens"))}
    pairs = (merge.partition(" ") for merge in file.need("tokenizer.ggml.merges"))
    merges = [(left, right) for left, _, right in pairs]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=pre.whole))
    if pre.composed:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre.split()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _write(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


SPACE = "\u2581"


def build_sentencepiece(file: GGUF) -> Tokenizer:
    """Returns SentencePiece's merging tokenizer (`tokenizer.ggml.model` is `llama`), without the added tokens.

    SentencePiece repeatedly joins the two neighbours whose joined text is the piece with the best score. A byte-pair
    encoder joins the pair that comes first in its list. Both give the same tokens if the list holds every pair that
    makes a piece, best pieces first. Spaces are written as U+2581. Characters that no piece covers are spelled in
    bytes.
    """
    texts: Sequence[str] = file.need("tokenizer.ggml.tokens")
    scores: Sequence[float] = file.need("tokenizer.ggml.scores")
    kinds: Sequence[int] = file.need("tokenizer.ggml.token_type")
    if not len(texts) == len(scores) == len(kinds):
        counts = f"{len(texts)} tokens, {len(scores)} scores and {len(kinds)} types"
        raise ConfigError(f"{file.path} has {counts}; it is not a whole model, download another conversion")
    if any(f"<0x{byte:02X}>" not in texts for byte in (0x00, 0xFF)):
        raise ConfigError(f"{file.path} has a SentencePiece tokenizer without bytes; use the model's safetensors")
    prefixed = bool(file.get("tokenizer.ggml.add_space_prefix", True))
    unknown = file.get("tokenizer.ggml.unknown_token_id")
    bpe = models.BPE(
        vocab={text: index for index, text in enumerate(texts)},
        merges=merges(texts, scores, kinds),
        unk_token=None if unknown is None else texts[unknown],
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = Tokenizer(bpe)
    spaces = normalizers.Replace(" ", SPACE)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), spaces]) if prefixed else spaces
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefixed else steps)
    return tokenizer


def merges(texts: Sequence[str], scores: Sequence[float], kinds: Sequence[int]) -> list[tuple[str, str]]:
    """Every pair of pieces whose joined text is a piece, ordered by that piece's score, best first, then by its id."""
    pieces = {text: index for index, text in enumerate(texts) if kinds[index] == NORMAL}
    pairs: list[tuple[str, str]] = []
    for text in sorted(pieces, key=lambda text: (-scores[pieces[text]], pieces[text])):
        cuts = ((text[:cut], text[cut:]) for cut in range(1, len(text)))
        pairs += [(left, right) for left, right in cuts if left in pieces and right in pieces]
    return pairs
