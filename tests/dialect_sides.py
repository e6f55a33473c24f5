"""The dialects on a scripted bridge: fixtures for the tests of each dialect and of all."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
from llmcore.text.tokenizer import FastTokenizer, load_tokenizer
from llmcore_devtools.dialect import Side
from llmcore_devtools.tokenizer import write_tokenizer
from llmcore_lightllm.routes import routes as lightllm_routes
from llmcore_openai.routes import routes as openai_routes


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> FastTokenizer:
    return load_tokenizer(write_tokenizer(tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture
def openai(tokenizer: FastTokenizer) -> Callable[..., Side]:
    return partial(Side.of, openai_routes, tokenizer)


@pytest.fixture
def lightllm(tokenizer: FastTokenizer) -> Callable[..., Side]:
    return partial(Side.of, lightllm_routes, tokenizer)
