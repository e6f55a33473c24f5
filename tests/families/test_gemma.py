"""Gemma 2 and 3 against transformers in f32: windows shorter than prompts, caps that bind, odd groups of heads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from llmcore.api.errors import ConfigError
from llmcore.api.models import ModelConfig
from llmcore.layers import Rows
from llmcore.registry.loader import load
from llmcore_devtools.family import SMALL, assert_family_matches_transformers, assert_same, oracle, small_model
from llmcore_devtools.loaded_model import LoadedModel, registry_for_tests

GEMMA2, GEMMA3 = "Gemma2ForCausalLM", "Gemma3ForCausalLM"
FILES = Path(__file__).parents[2] / "contrib_models"
OURS: dict[str, Any] = {"head_dim": 12, "query_pre_attn_scalar": 20, "sliding_window": 8, "pad_token_id": None}
PROMPTS = (1, 8, 29, 61)
FULL, SLIDING = "full_attention", "sliding_attention"
PLAIN = {"rope_type": "default", "rope_theta": 9.0}


def ropes(full: dict[str, Any], sliding: dict[str, Any]) -> dict[str, Any]:
    return {"rope_parameters": {FULL: full, SLIDING: sliding}}


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "2, caps that bind": (GEMMA2, {"attn_logit_softcapping": 0.7, "final_logit_softcapping": 1.5}),
    "2, no caps": (GEMMA2, {"attn_logit_softcapping": None, "final_logit_softcapping": None}),
    "2, one KV head, its own head": (
        GEMMA2,
        {"num_attention_heads": 5, "num_key_value_heads": 1, "hidden_size": 40, "head_dim": 16}
        | {"tie_word_embeddings": False, "attention_bias": True, "layer_types": [FULL, FULL, SLIDING]},
    ),
    "2, full layers alone": (GEMMA2, {"layer_types": [FULL] * 3}),
    "3": (GEMMA3, {"sliding_window_pattern": 2}),
    "3, windowed layers alone": (GEMMA3, {}),
    "3, cap, biases, its own head": (
        GEMMA3,
        {"num_attention_heads": 7, "num_key_value_heads": 1, "hidden_size": 56, "head_dim": 10}
        | {"final_logit_softcapping": 1.5, "attention_bias": True, "tie_word_embeddings": False}
        | {"layer_types": [SLIDING, FULL, SLIDING]},
    ),
    "3, linear": (
        GEMMA3,
        {"sliding_window_pattern": 2} | ropes({"rope_type": "linear", "factor": 8.0, "rope_theta": 3e4}, PLAIN),
    ),
    "3, llama3 and dynamic": (
        GEMMA3,
        {"layer_types": [FULL, SLIDING, FULL], "max_position_embeddings": 40}
        | ropes(
            {
                **{"rope_type": "llama3", "factor": 8.0, "rope_theta": 5e4, "original_max_position_embeddings": 32},
                **{"low_freq_factor": 1.0, "high_freq_factor": 4.0},
            },
            {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
        ),
    ),
}


@pytest.mark.parametrize(("architecture", "overrides"), CASES.values(), ids=CASES)
def test_gemma(architecture: str, overrides: dict[str, Any]) -> None:
    assert_family_matches_transformers(architecture, prompts=PROMPTS, **{**OURS, **overrides})


@pytest.mark.parametrize("name", ["gemma2", "gemma3"])
def test_the_file_alone_is_a_plugin(name: str) -> None:
    registry = registry_for_tests([str(FILES / f"{name}.py")])
    assert "contrib-models" not in {info.name for info in registry.plugins}
    architecture = f"{name.capitalize()}ForCausalLM"
    assert_family_matches_transformers(architecture, registry=registry, prompts=(12,), **OURS)


def test_gemma3_as_older_files_say_it(tmp_path: Path) -> None:
    """A base for each kind of layer, the scaling of full ones, and how often they come."""
    theirs = small_model(
        GEMMA3,
        **OURS,
        layer_types=[SLIDING, FULL, SLIDING],
        **ropes({"rope_type": "linear", "factor": 8.0, "rope_theta": 3e4}, PLAIN),
    )
    theirs.save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    config = {k: v for k, v in json.loads(file.read_text()).items() if k not in ("rope_parameters", "layer_types")}
    config |= {"rope_theta": 3e4, "rope_local_base_freq": 9.0, "sliding_window_pattern": 2}
    file.write_text(json.dumps(config | {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}))
    prompt = list(range(30))
    ours = LoadedModel(tmp_path)
    assert_same("older file", ours.generate(prompt, 5), oracle(theirs, prompt, 5), 1e-4)
    assert ours.config.max_position == 64
    assert [(g.name, g.layers, g.reach) for g in ours.config.kv_groups] == [
        ("full", (1,), "all"),
        ("window", (0, 2), "window:8"),
    ]


@pytest.mark.parametrize("architecture", [GEMMA2, GEMMA3])
def test_half_types_round_where_transformers_does(architecture: str, tmp_path: Path) -> None:
    """sqrt(hidden) is rounded to bf16, 1 + weight is not."""
    theirs = small_model(architecture, **OURS).bfloat16()
    theirs.save_pretrained(tmp_path)
    ours = LoadedModel(tmp_path, data_type="bf16").model
    ids, rows = torch.arange(30), Rows(2)
    embedded = ours.embed_tokens(ids, rows)
    with torch.no_grad():
        assert torch.equal(embedded, theirs.model.embed_tokens(ids))
        close = torch.isclose(ours.norm(embedded, rows), theirs.model.norm(embedded), rtol=2**-8, atol=0)
        assert torch.equal(ours.norm.weight, 1 + theirs.model.norm.weight.float()) and close.all()


def test_layers_of_files_that_do_not_name_them() -> None:
    """Gemma 2 alternates from a windowed layer on; of Gemma 3 every sixth layer is full."""
    groups = {
        architecture: {group.name: group.layers for group in read(architecture, num_hidden_layers=7).kv_groups}
        for architecture in (GEMMA2, GEMMA3)
    }
    assert groups[GEMMA2] == {"full": (1, 3, 5), "window": (0, 2, 4, 6)}
    assert groups[GEMMA3] == {"full": (5,), "window": (0, 1, 2, 3, 4, 6)}


def read(architecture: str, **fields: Any) -> ModelConfig:
    spec = registry_for_tests().model_for([architecture])
    config: ModelConfig = load(spec.read_config)({**SMALL, **fields})
    return config


WRONG: dict[str, dict[str, Any]] = {
    "gelu": {"hidden_activation": "gelu"},
    "use_bidirectional_attention": {"use_bidirectional_attention": True},
    "chunked_attention": {"layer_types": ["chunked_attention", FULL, FULL]},
    "window is 0": {"sliding_window": 0},
    "2 layers": {"layer_types": [FULL, SLIDING]},
}


@pytest.mark.parametrize("said", WRONG)
@pytest.mark.parametrize("architecture", [GEMMA2, GEMMA3])
def test_what_is_not_known_is_said(architecture: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        read(architecture, **WRONG[said])
