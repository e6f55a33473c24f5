"""MistralForCausalLM against transformers, with and without a window, installed and as a file."""

from __future__ import annotations

from pathlib import Path

import pytest
from llmcore_devtools.family import assert_family_matches_transformers
from llmcore_devtools.loaded_model import registry_for_tests

FILE = Path(__file__).parents[2] / "contrib_models" / "mistral.py"


@pytest.mark.parametrize("window", [None, 8, 200])
def test_mistral(window: int | None) -> None:
    assert_family_matches_transformers("MistralForCausalLM", prompts=(1, 8, 30, 61), sliding_window=window)


def test_the_file_alone_is_a_plugin() -> None:
    registry = registry_for_tests([str(FILE)])
    assert "contrib-models" not in {info.name for info in registry.plugins}
    assert_family_matches_transformers("MistralForCausalLM", registry=registry, prompts=(12,), sliding_window=6)
