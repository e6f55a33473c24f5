"""Whatever ships inside or in this tree keeps the contracts, as anybody's plugin must."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from llmcore.registry.loader import available
from llmcore.registry.registry import Registry
from llmcore_devtools import check_plugin, family, registry_of
from llmcore_devtools.tokenizer import write_tokenizer


def test_the_fixture_that_pytest_finds_by_itself(llmcore_registry: Callable[..., Registry]) -> None:
    registry = llmcore_registry("llama", "-radix")
    assert {"llama", "ops"} < {info.name for info in registry.plugins}
    assert "radix" not in {info.name for info in registry.plugins}


@pytest.fixture
def once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every family answers one short prompt; tests/families compares each at length."""
    whole = family.assert_family_matches_transformers
    monkeypatch.setattr(family, "assert_family_matches_transformers", partial(whole, prompts=(13,), new=2))


ONLY_ON_A_GPU = {"triton"}
"""Plugins with kernels that do not run here; tests/triton/interpreter and `llmcore kernels --check` compare those."""


BESIDE = {"triton": ("deepseek", "quantization"), "quantization": ("triton",)}
"""Plugin -> other plugins for whose ops it has kernels, or whose kernels its modes pin."""


@pytest.mark.usefixtures("once")
@pytest.mark.parametrize("plugin", [info.name for info in available()])
def test_plugin(plugin: str, tmp_path: Path) -> None:
    samples = [write_tokenizer(tmp_path)] if plugin == "tokenizers" else []
    checked = check_plugin(registry_of(plugin, *BESIDE.get(plugin, ())), plugin, samples)
    assert all(checked.values()) or plugin in ONLY_ON_A_GPU
