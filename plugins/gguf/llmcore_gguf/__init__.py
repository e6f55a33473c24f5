"""GGUF files: weights, tokenizer and chat template of a model in one file, as llama.cpp reads them."""

from collections.abc import Iterable

from llmcore.api import TokenizerSpec, WeightLoaderSpec, hookimpl


@hookimpl
def register_weight_loaders() -> Iterable[WeightLoaderSpec]:
    """A .gguf file, or a directory that holds one."""
    yield WeightLoaderSpec(
        name="gguf",
        sniff=f"{__name__}.reader:sniff",
        open=f"{__name__}.checkpoint:GGUFCheckpoint",
        summary="llama.cpp's files, dequantized to bf16",
    )


@hookimpl
def register_tokenizers() -> Iterable[TokenizerSpec]:
    """The tokenizer inside the file, written out as tokenizer.json."""
    yield TokenizerSpec(
        name="gguf",
        sniff=f"{__name__}.reader:sniff",
        convert=f"{__name__}.tokenizer:convert",
        summary="the tokenizer and chat template of a GGUF file",
    )
