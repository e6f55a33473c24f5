"""A tokenizer, what plugin-guided is told of it, and grammars that nothing hurries."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import pytest
from llmcore.api import ProcessorContext, Tokenizer
from llmcore.api.text import load_tokenizer
from llmcore_devtools.tokenizer import EOS, write_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(write_tokenizer(tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture(scope="module")
def context(tokenizer: Tokenizer) -> ProcessorContext:
    from guided_answers import VOCAB

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
