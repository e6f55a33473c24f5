"""`--tokenizer_mode slow`: the `sentencepiece` package reads a model's tokenizer.model."""

from __future__ import annotations

from collections.abc import Iterable

from llmcore.api import TokenizerSpec, hookimpl


@hookimpl
def register_tokenizers() -> Iterable[TokenizerSpec]:
    """The tokenizer of models with a tokenizer.model."""
    yield TokenizerSpec(
        name="sentencepiece",
        summary="tokenizer.model, with --tokenizer_mode slow",
        sniff=f"{__name__}.tokenizer:has_tokenizer_model",
        load=f"{__name__}.tokenizer:load_tokenizer",
        mode="slow",
    )
