"""Answers under a grammar of plugin-guided, token by token."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
import pytest
from llmcore.api import ProcessorContext, Tokenizer, words_of
from llmcore.api.text import load_tokenizer
from llmcore_devtools.tokenizer import EOS, write_tokenizer
from llmcore_guided.processor import Guided, make

VOCAB = 301
"""More than the tokenizer has."""


def one(context: ProcessorContext, **args: Any) -> Guided:
    return make(args, context)(np.zeros(1, np.int32))


def allowed(processor: Guided) -> list[int]:
    words = processor.mask()
    assert words.shape == (words_of(VOCAB),) and words.dtype == np.int32
    bits = np.unpackbits(words.view(np.uint8), bitorder="little")
    return [int(bit) for bit in np.flatnonzero(bits)]


def spell(processor: Guided, tokenizer: Tokenizer, text: str) -> bool:
    """Whether the text's own tokens are let through and may end the answer."""
    ended = False
    for token in tokenizer.encode(text, add_special_tokens=False):
        if ended or token not in allowed(processor):
            return False
        processor.accept(token)
        ended = processor.finished()
    return ended or EOS in allowed(processor)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(write_tokenizer(tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture(scope="module")
def context(tokenizer: Tokenizer) -> ProcessorContext:
    @cache
    def opened() -> Tokenizer:
        return tokenizer

    return ProcessorContext(VOCAB, (EOS,), opened, stop_ids=(EOS,))


@pytest.fixture(scope="module")
def patient() -> Iterator[None]:
    """What is compiled or found wrong does not depend on how busy the machine is, but where a test says so."""
    from llmcore_guided import compiler, limits

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(limits, "COMPILE_SECONDS", 60.0)
        patch.setattr(limits, "PATIENCE_SECONDS", 60.0)
        patch.setattr(compiler, "TRIED_SECONDS", 60.0)
        yield
