"""Families over quantized KV: their logits are those of transformers with keys, values and latents rounded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from changed_cache import MODES, ChangedCache, rounded
from llmcore_devtools.family import small_model
from llmcore_devtools.loaded_model import LoadedModel, registry_for_tests
from witness import float8

REGISTRY = registry_for_tests()
IDS = [5, 99, 3, 77, 20, 41, 8, 1, 64, 17, 2, 90]


def check(folder: Path, mode: str, theirs: Any, cache: Callable[[], Any]) -> None:
    """Compare a whole prompt, and one in chunks."""
    with torch.inference_mode():
        expected = theirs(torch.tensor([IDS]), past_key_values=cache(), use_cache=True).logits[0].float()
    ours = LoadedModel(folder, modes=(mode,), registry=REGISTRY)
    plain = LoadedModel(folder, registry=REGISTRY).all_logits(IDS)
    assert (plain - expected).norm() > 1e-3 * expected.norm()
    for chunk in (None, 5):
        assert (ours.all_logits(IDS, chunk=chunk) - expected).norm() < 1e-4 * expected.norm()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen3ForCausalLM", "Gemma2ForCausalLM"])
def test_keys_and_values(architecture: str, mode: str, tmp_path: Path) -> None:
    """Qwen3 norms its heads; Gemma 2 has two KV groups, one of them with a window, and a soft cap."""
    more = {"sliding_window": 6} if architecture.startswith("Gemma") else {}
    theirs = small_model(architecture, **more)
    theirs.save_pretrained(tmp_path)
    check(tmp_path, mode, theirs, lambda: rounded(MODES[mode]))


def test_latents(tmp_path: Path) -> None:
    theirs = small_model("DeepseekV3ForCausalLM")
    theirs.save_pretrained(tmp_path)
    for layer in theirs.model.layers:
        layer.self_attn.kv_a_layernorm.register_forward_hook(lambda module, given, latent: float8(latent))
    check(tmp_path, "triton_fp8kv", theirs, lambda: ChangedCache(lambda layer, k, v: (k, v)))
