"""MixtralForCausalLM against transformers: experts of any number and size, with and without a window."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from llmcore.api.errors import ConfigError
from llmcore.weights.source import read_model
from llmcore_devtools.family import SMALL, assert_family_matches_transformers, small_model
from llmcore_devtools.loaded_model import LoadedModel, registry_for_tests
from safetensors.torch import load_file, save_file

FILE = Path(__file__).parents[2] / "contrib_models" / "mixtral.py"
ARCHITECTURE = "MixtralForCausalLM"

CASES: dict[str, dict[str, Any]] = {
    "two of eight": {},
    "one of one, tied": {"num_local_experts": 1, "num_experts_per_tok": 1, "tie_word_embeddings": True},
    "all of three, a window": {"num_local_experts": 3, "num_experts_per_tok": 3, "sliding_window": 8},
    "seven of 33, odd sizes": {
        "num_local_experts": 33,
        "num_experts_per_tok": 7,
        "intermediate_size": 13,
        "num_attention_heads": 5,
        "num_key_value_heads": 1,
        "hidden_size": 35,
        "rms_norm_eps": 0.01,
    },
}


@pytest.mark.parametrize("overrides", CASES.values(), ids=CASES)
def test_mixtral(overrides: dict[str, Any]) -> None:
    assert_family_matches_transformers(ARCHITECTURE, prompts=(1, 12, 33), new=3, **overrides)


def test_the_file_alone_is_a_plugin() -> None:
    registry = registry_for_tests([str(FILE)])
    assert "contrib-models" not in {info.name for info in registry.plugins}
    assert_family_matches_transformers(ARCHITECTURE, registry=registry, prompts=(12,), new=3)


def read(**fields: Any) -> Any:
    return read_model(registry_for_tests(), {"architectures": [ARCHITECTURE], **fields})[1]


def test_what_a_config_leaves_out() -> None:
    needed = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    short = {name: SMALL[name] for name in needed} | {"hidden_size": 256, "num_attention_heads": 16}
    config = read(**short)
    full = transformers.MixtralConfig(**short).to_dict()
    assert config == read(
        **{name: value for name, value in full.items() if name not in ("rope_parameters", "architectures")}
    )
    assert config.rope.theta == full["rope_parameters"]["rope_theta"]
    assert (config.route.experts, config.route.top_k, config.route.normalize) == (8, 2, True)


def test_another_activation_is_refused() -> None:
    with pytest.raises(ConfigError, match="hidden_act 'gelu' is not known"):
        read(**{**SMALL, "hidden_act": "gelu"})


def test_a_checkpoint_that_holds_the_stacks(tmp_path: Path) -> None:
    """Gives the same model as one that holds every expert by itself."""
    theirs = small_model(ARCHITECTURE, num_local_experts=3)
    folders = tmp_path / "each", tmp_path / "stacked"
    for folder in folders:
        theirs.save_pretrained(folder)
    held = load_file(folders[1] / "model.safetensors")
    assert any(".experts.2.w3." in name for name in held)
    kept = {name: tensor for name, tensor in held.items() if ".experts." not in name}
    for name, tensor in theirs.state_dict().items():
        if ".experts." in name:
            kept[name.replace(".mlp.", ".block_sparse_moe.")] = tensor.contiguous()
    assert any(tensor.dim() == 3 for tensor in kept.values())
    save_file(kept, folders[1] / "model.safetensors")
    one, other = (LoadedModel(folder) for folder in folders)
    assert torch.equal(one.all_logits(range(20)), other.all_logits(range(20)))
    assert one.weight_bytes == other.weight_bytes == sum(t.nbytes for t in theirs.state_dict().values())
    assert json.loads((folders[0] / "config.json").read_text())["architectures"] == [ARCHITECTURE]
