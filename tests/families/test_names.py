"""Every family's names: what is missing is called as the file would call it, buffers are no matter, the rest is."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from llmcore.api.errors import ConfigError
from llmcore.api.specs import ModelSpec
from llmcore_devtools.family import small_model
from llmcore_devtools.loaded_model import LoadedModel, registry_for_tests
from safetensors.torch import load_file, save_file

SPARSE = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "num_local_experts": 3}
REGISTRY = registry_for_tests()
ARCHITECTURES = sorted(name for spec, _ in REGISTRY.specs(ModelSpec) for name in spec.architectures)
OURS_ALONE = {"LlmcoreFake", "Qwen2ForRewardModel"}
"""transformers has no such classes."""
BUFFERS = {
    "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4),
    "model.layers.1.self_attn.rotary_emb.cos_cached": torch.ones(1, 1, 64, 8),
    "model.rotary_emb.inv_freq": torch.ones(4),
    "model.layers.0.self_attn.masked_bias": torch.tensor(-1e9),
    "model.layers.0.attn.bias": torch.ones(1, 1, 64, 64, dtype=torch.bool),
    "model.layers.0.attention.masked_bias": torch.tensor(-1e9),
    "model.embeddings.position_ids": torch.arange(64),
}


@cache
def saved(architecture: str, folder: Path) -> dict[str, torch.Tensor]:
    more = SPARSE if "Moe" in architecture or "Mixtral" in architecture else {}
    small_model(architecture, num_hidden_layers=2, tie_word_embeddings=False, **more).save_pretrained(folder)
    return load_file(folder / "model.safetensors")


@pytest.fixture(scope="module", params=[name for name in ARCHITECTURES if name not in OURS_ALONE])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp(request.param)
    return folder, saved(request.param, folder)


def error_of(folder: Path, tensors: dict[str, torch.Tensor]) -> str:
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ConfigError, match="does not fit the model") as error:
        LoadedModel(folder, registry=REGISTRY)
    return str(error.value)


def listed(text: str, what: str) -> set[str]:
    part = text.partition(f"{what}: ")[2]
    return set(part.split(". ")[0].split("; ")[0].split(", "))


def test_buffers_are_skipped(checkpoint: tuple[Path, dict[str, torch.Tensor]]) -> None:
    folder, tensors = checkpoint
    save_file({**tensors, **BUFFERS}, folder / "model.safetensors")
    LoadedModel(folder, registry=REGISTRY)


def test_what_is_missing_and_what_nothing_takes(checkpoint: tuple[Path, dict[str, torch.Tensor]]) -> None:
    folder, tensors = checkpoint
    # one of a kind, one of layer 1 alone, and one of an expert
    ends = ("embed_tokens.weight", "layers.1.input_layernorm.weight", "layers.1.post_attention_layernorm.weight")
    ends += ("1.self_attn.k_proj.weight", "1.self_attn.qkv_proj.weight", "1.mlp.up_proj.weight", "1.w3.weight")
    ends += ("lm_head.weight", "score.weight", "experts.1.up_proj.weight", "1.mlp.gate_up_proj.weight")
    gone = {name for name in tensors if name.endswith(ends)}
    assert 3 <= len(gone) <= 8
    rest = {name: tensor for name, tensor in tensors.items() if name not in gone}
    text = error_of(folder, {**rest, "model.vision.weight": torch.ones(1), "model.layers.0.extra": torch.ones(1)})
    assert listed(text, "missing") == gone
    assert listed(text, "unexpected") == {"model.vision.weight", "model.layers.0.extra"}


def test_a_head_that_nothing_has(tmp_path: Path) -> None:
    """Names that no other tensor is like: the start comes from the family's rules."""
    tensors = dict(saved("LlamaForCausalLM", tmp_path))
    whole = set(tensors)
    text = error_of(tmp_path, {name: tensor for name, tensor in tensors.items() if ".layers." in name})
    assert listed(text, "missing") == {name for name in whole if ".layers." not in name}
    bare = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    del bare["layers.1.self_attn.q_proj.weight"]
    assert listed(error_of(tmp_path, bare), "missing") == {"layers.1.self_attn.q_proj.weight"}


def test_a_config_of_more_layers_than_the_file(tmp_path: Path) -> None:
    tensors = saved("LlamaForCausalLM", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    text = error_of(tmp_path, dict(tensors))
    assert "model.layers.2.self_attn.k_proj.weight" in text and "qkv_proj" not in text
    assert "and 1 more" in text
