from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
from llmcore.builtin.lightllm.routes import routes as lightllm_routes
from llmcore.builtin.openai.routes import routes as openai_routes
from llmcore.testing.dialect import Side
from llmcore.testing.tokenizer import write_tokenizer
from llmcore.text.tokenizer import FastTokenizer, load_tokenizer


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> FastTokenizer:
    return load_tokenizer(write_tokenizer(tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture
def openai(tokenizer: FastTokenizer) -> Callable[..., Side]:
    return partial(Side.of, openai_routes, tokenizer)


@pytest.fixture
def lightllm(tokenizer: FastTokenizer) -> Callable[..., Side]:
    return partial(Side.of, lightllm_routes, tokenizer)
