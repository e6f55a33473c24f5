"""Whatever ships inside or in this tree keeps the contracts, as anybody's plugin must."""

from __future__ import annotations

from pathlib import Path

import pytest
from llmcore.plugins import available
from llmcore.testing import check_plugin, registry_of
from llmcore.testing.tokenizer import write_tokenizer


@pytest.mark.parametrize("plugin", [info.name for info in available()])
def test_plugin(plugin: str, tmp_path: Path) -> None:
    samples = [write_tokenizer(tmp_path)] if plugin == "tokenizers" else []
    checked = check_plugin(registry_of(plugin), plugin, samples)
    assert all(checked.values())
