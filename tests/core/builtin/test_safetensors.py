"""The built-in weight loader: which directories it recognises."""

from __future__ import annotations

from pathlib import Path

import torch
from llmcore.builtin.safetensors import register_weight_loaders
from llmcore.registry.loader import load
from safetensors.torch import save_file


def test_it_recognises_config_and_weights_and_opens_them(tmp_path: Path) -> None:
    (spec,) = register_weight_loaders()
    sniff = load(spec.sniff)
    assert not sniff(tmp_path)
    save_file({"a": torch.ones(2, 3)}, tmp_path / "model.safetensors")
    assert not sniff(tmp_path), "config.json is missing"
    (tmp_path / "config.json").write_text("{}")
    assert sniff(tmp_path)
    assert load(spec.open)(tmp_path).sizes() == {"a": ((2, 3), "F32")}
