"""Sources of tokenizers: tokenizer.json, and any tokenizer that transformers can build."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path

from llmcore.api import ConfigError, TokenizerSpec, hookimpl


@hookimpl
def register_tokenizers() -> Iterable[TokenizerSpec]:
    """The `tokenizers` package, and a conversion for the rest."""
    yield TokenizerSpec(
        name="tokenizers",
        summary="tokenizer.json",
        sniff="llmcore.text.tokenizer:has_tokenizer_json",
        load="llmcore.text.tokenizer:load_tokenizer",
    )
    yield TokenizerSpec(
        name="transformers",
        summary="any tokenizer that transformers can build, converted once",
        sniff=f"{__name__}:has_tokenizer_files",
        convert=f"{__name__}:convert",
        priority=10,
    )


_FILES = ("tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json")
_KEPT = ("generation_config.json", "config.json")


def has_tokenizer_files(model: Path) -> bool:
    """TokenizerSpec.sniff: True for a directory with files that transformers can make a tokenizer of."""
    return any((model / name).is_file() for name in _FILES)


def convert(model: Path, out: Path, trust_remote_code: bool = False) -> None:
    """TokenizerSpec.convert: write a tokenizer.json to `out`. Raises ConfigError if transformers cannot build one."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(
            model, use_fast=True, local_files_only=True, trust_remote_code=trust_remote_code
        )
    except (OSError, ValueError, ImportError, KeyError) as error:
        raise ConfigError(f"transformers cannot build it: {' '.join(str(error).split())}") from error
    if not tokenizer.is_fast:
        raise ConfigError("transformers has only a slow tokenizer for it; use --tokenizer_mode slow")
    tokenizer.save_pretrained(out)
    for name in _KEPT:
        if (model / name).is_file():
            shutil.copy(model / name, out / name)
