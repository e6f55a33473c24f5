"""DeepseekV2ForCausalLM and DeepseekV3ForCausalLM against transformers in f32, and what their configs mean."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from llmcore import LLM
from llmcore.api import ConfigError
from llmcore.registry.loader import load
from llmcore.weights.source import read_model
from llmcore_deepseek import latent
from llmcore_deepseek.config import DeepseekConfig
from llmcore_deepseek.latent import LatentSizes
from llmcore_devtools.family import (
    SMALL,
    SMALL_LATENT,
    assert_family_matches_transformers,
    assert_same,
    oracle,
    small_model,
)
from llmcore_devtools.loaded_model import LoadedModel, registry_for_tests
from safetensors.torch import load_file, save_file
from transformers.models.deepseek_v2 import modeling_deepseek_v2

V2, V3 = "DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM"
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 8,
    "mscale": 0.9,
    "mscale_all_dim": 0.6,
}
EVEN = {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707}


def heads(heads: int, plain: int, rotated: int, value: int, rank: int) -> dict[str, Any]:
    sizes = {"qk_nope_head_dim": plain, "qk_rope_head_dim": rotated, "v_head_dim": value, "kv_lora_rank": rank}
    return {"num_attention_heads": heads, "hidden_size": 8 * heads, "head_dim": rotated, **sizes}


def experts(count: int, top: int, *groups: int) -> dict[str, Any]:
    given = {"n_routed_experts": count, "num_experts_per_tok": top}
    return {**given, "n_group": groups[0], "topk_group": groups[1]} if groups else given


LIMITED = {"topk_method": "group_limited_greedy", "routed_scaling_factor": 3.0}
CASES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    # as V2-Lite, whose two mscales cancel in the angles and not in the scores
    "V2: no latent for queries, yarn": (
        V2,
        {"q_lora_rank": None, "rope_parameters": EVEN, "rms_norm_eps": 1e-3, **experts(8, 6, 1, 1)},
    ),
    "V2: groups, yarn": (V2, {**LIMITED, **experts(64, 6, 8, 3), "rope_parameters": YARN, **heads(5, 6, 4, 7, 14)}),
    "V2: one expert, first": (V2, {**experts(1, 1), "first_k_dense_replace": 0, "attention_bias": True}),
    "V2: dense, tied": (V2, {"first_k_dense_replace": 9, "tie_word_embeddings": True, "q_lora_rank": None}),
    "V3: groups, yarn": (V3, {**experts(32, 8, 8, 4), "rope_parameters": YARN, **heads(3, 16, 10, 9, 30)}),
    "V3: biases, two dense": (
        V3,
        {**experts(12, 4, 2, 1), "attention_bias": True, "first_k_dense_replace": 2, "num_hidden_layers": 4},
    ),
    "V3: halves, not normalized": (
        V3,
        {"rope_interleave": False, "q_lora_rank": None, "norm_topk_prob": False, **experts(6, 2, 1, 1)},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_deepseek(name: str) -> None:
    architecture, overrides = CASES[name]
    assert_family_matches_transformers(architecture, prompts=(1, 14, 41), new=4, seed=len(name), **overrides)


@pytest.mark.parametrize("piece", [3, 16])
def test_prompts_in_pieces_of_their_prefix(piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every prompt is expanded, also where that costs more, and so little of what is cached at a time."""
    monkeypatch.setattr(latent, "PREFIX_TOKENS", piece)
    monkeypatch.setattr(LatentSizes, "costs", lambda *given: (1, 0))
    assert_family_matches_transformers(V2, prompts=(2, 31), new=3, rope_parameters=YARN)


def given(architecture: str, **more: Any) -> dict[str, Any]:
    config = getattr(transformers, architecture).config_class(**{**SMALL, **SMALL_LATENT, **more})
    return {**config.to_dict(), **more}


def read(architecture: str, hf: Mapping[str, Any]) -> DeepseekConfig:
    config: DeepseekConfig = load(registry_for_tests(["deepseek"]).model_for([architecture]).read_config)(hf)
    return config


def test_normalized_weights_of_v2_are_not_scaled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As the model's own code has it; transformers ignores norm_topk_prob, so the oracle's router is changed."""
    forward = modeling_deepseek_v2.DeepseekV2TopkRouter.forward

    def normalized(self: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        logits, weights, indices = forward(self, x)
        return logits, weights / weights.sum(-1, keepdim=True), indices

    monkeypatch.setattr(modeling_deepseek_v2.DeepseekV2TopkRouter, "forward", normalized)
    assert_family_matches_transformers(V2, prompts=(9,), new=2, norm_topk_prob=True, routed_scaling_factor=16.0)


def test_layers_for_further_tokens_are_skipped(tmp_path: Path) -> None:
    theirs = small_model(V3, num_nextn_predict_layers=2)
    theirs.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    more = {f"model.layers.{layer}.{name}": torch.ones(3) for layer in (3, 4) for name in ("eh_proj.weight", "enorm")}
    save_file({**tensors, **more}, tmp_path / "model.safetensors")
    assert_same("skipped", LoadedModel(tmp_path).generate([5, 6, 7], 2), oracle(theirs, [5, 6, 7], 2), 1e-4)


def test_which_layers_are_sparse() -> None:
    hf = given(V2, num_hidden_layers=7, first_k_dense_replace=1, moe_layer_freq=3)
    assert read(V2, hf).sparse == (False, False, False, True, False, False, True)


def test_a_token_is_one_row_for_all_heads() -> None:
    (group,) = read(V3, given(V3)).kv_groups
    assert (group.kv_heads, group.key_size, group.value_size, group.layout) == (1, 32, 24, "mla-latent")
    layout = load("llmcore_deepseek.layout:LatentLayout")(group, 4, "bf16")
    assert layout.bytes == 3 * 4 * 32 * 2
    assert not layout.sharded


@pytest.mark.parametrize(
    ("architecture", "wrong", "said"),
    [
        (V2, {"scoring_func": "sigmoid"}, "scoring_func 'sigmoid'"),
        (V2, {"topk_method": "noaux_tc"}, "topk_method 'noaux_tc'"),
        (V3, {"topk_method": "greedy"}, "topk_method 'greedy'"),
        (V3, {"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        (V2, {"mlp_bias": True}, "mlp_bias"),
        (V3, {"rope_scaling": {"type": "mrope"}}, "rope type 'mrope'"),
    ],
)
def test_what_is_not_known_is_refused(architecture: str, wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        read(architecture, {**given(architecture), **wrong})


def test_v2_lite_with_two_layers_generates(tmp_path: Path) -> None:
    """The benchmark's config, its widths divided, with dummy weights through the whole engine."""
    whole = json.loads(Path("benchmarks/configs/deepseek-v2-lite/config.json").read_text())
    narrow = {"hidden_size": 256, "intermediate_size": 320, "moe_intermediate_size": 64, "vocab_size": 300}
    config = {**whole, **narrow, "num_hidden_layers": 2, "n_routed_experts": 8, "eos_token_id": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    draw = np.random.default_rng(0)
    prompts = [draw.integers(2, 300, n).tolist() for n in (3, 70, 150)]
    settings: dict[str, Any] = {"load_format": "dummy", "device": "cpu", "data_type": "fp32"}
    answers = []
    for chunk in (None, 32):
        more = {} if chunk is None else {"chunked_prefill_size": chunk}
        with LLM(tmp_path, **settings, max_total_token_num=900, **more) as llm:
            answers.append([out.token_ids for out in llm.generate(prompts, temperature=0.0, max_new_tokens=5)])
    assert answers[0] == answers[1]
    assert [len(ids) for ids in answers[0]] == [5, 5, 5]


def test_a_null_that_is_no_answer_is_named() -> None:
    registry = registry_for_tests()
    config = {"architectures": ["DeepseekV3ForCausalLM"], "vocab_size": 8, "hidden_size": 8, "n_group": None}
    with pytest.raises(ConfigError, match="null here: n_group"):
        read_model(registry, {"num_attention_heads": 2, "num_hidden_layers": 1, **config})
