"""`--load_format dummy` for a config.json that describes packed weights, without any: how formats are benchmarked."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from llmcore_devtools.family import small_model
from llmcore_devtools.loaded_model import LoadedModel, registry_for_tests
from packers import CASES

SIZES = {"hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 2, "intermediate_size": 128}
REGISTRY = registry_for_tests()


@pytest.mark.parametrize("name", ["awq", "gptq, desc_act, asymmetric", "ct, 4 bits", "ct, int8, static", "fp8"])
def test_codes_are_random_and_logits_are_finite(name: str, tmp_path: Path) -> None:
    config = small_model("LlamaForCausalLM", **SIZES).config.to_dict()
    config |= {"architectures": ["LlamaForCausalLM"], "quantization_config": CASES[name].config}
    (tmp_path / "config.json").write_text(json.dumps(config))
    drawn = LoadedModel(tmp_path, registry=REGISTRY, dummy=True)
    for module in ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj"):
        first, second = (drawn.model.get_submodule(f"layers.{layer}.{module}").codes for layer in (0, 1))
        assert len(first.view(torch.uint8).unique()) > 200
        assert not torch.equal(first.view(torch.uint8), second.view(torch.uint8))
    logits = drawn.all_logits([5, 99, 3])
    assert bool(logits.isfinite().all()) and float(logits.std()) > 0
