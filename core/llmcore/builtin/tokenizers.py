"""Sources of tokenizers: tokenizer.json, tokenizer.model on request, and any tokenizer that transformers can build."""

from __future__ import annotations

from collections.abc import Iterable

from llmcore.api import TokenizerSpec, hookimpl


@hookimpl
def register_tokenizers() -> Iterable[TokenizerSpec]:
    """The `tokenizers` package, the `sentencepiece` package, and a conversion for the rest."""
    yield TokenizerSpec(
        name="tokenizers",
        summary="tokenizer.json",
        sniff="llmcore.text.tokenizer:has_tokenizer_json",
        load="llmcore.text.tokenizer:load_tokenizer",
    )
    yield TokenizerSpec(
        name="sentencepiece",
        summary="tokenizer.model, with --tokenizer_mode slow",
        sniff="llmcore.text.slow:has_sentencepiece_model",
        load="llmcore.text.slow:load_slow",
        mode="slow",
    )
    yield TokenizerSpec(
        name="transformers",
        summary="any tokenizer that transformers can build, converted once",
        sniff="llmcore.builtin.transformers_tokenizer:has_tokenizer_files",
        convert="llmcore.builtin.transformers_tokenizer:convert",
        priority=10,
    )
