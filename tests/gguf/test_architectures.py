"""GGUF files of every architecture that is read: small random models, written as llama.cpp's converter would."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from gguf import MODEL_ARCH, MODEL_ARCH_NAMES, GGUFWriter, get_tensor_name_map
from llmcore.api.errors import ConfigError
from llmcore_devtools.family import assert_same, oracle, small_model
from llmcore_devtools.loaded_model import LoadedModel
from llmcore_gguf.checkpoint import GGUFCheckpoint
from llmcore_gguf.config import ARCHITECTURES

ENUMS = {name: arch for arch, name in MODEL_ARCH_NAMES.items()}

Overrides = Mapping[str, Any]

SMALL_GEMMA: Overrides = {
    "num_hidden_layers": 7,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "sliding_window": 8,
    "query_pre_attn_scalar": 8,
}
"""As the format has it: the scale of scores is the head's size."""

ROPES_OF_GEMMA3: Overrides = {
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
}

CASES: list[tuple[str, str, Overrides]] = [
    ("qwen2", "Qwen2ForCausalLM", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    ("qwen2", "Qwen2ForCausalLM", {"tie_word_embeddings": True}),
    ("qwen3", "Qwen3ForCausalLM", {"head_dim": 16}),
    ("qwen3", "Qwen3ForCausalLM", {"attention_bias": True}),
    ("gemma2", "Gemma2ForCausalLM", {**SMALL_GEMMA, "final_logit_softcapping": 5.0, "attn_logit_softcapping": 2.0}),
    ("gemma3", "Gemma3ForCausalLM", SMALL_GEMMA),
    ("gemma3", "Gemma3ForCausalLM", {**SMALL_GEMMA, **ROPES_OF_GEMMA3, "final_logit_softcapping": 5.0}),
    ("olmo2", "Olmo2ForCausalLM", {"num_key_value_heads": 3}),
    (
        "granite",
        "GraniteForCausalLM",
        {
            "attention_multiplier": 0.2,
            "embedding_multiplier": 1.5,
            "residual_multiplier": 0.3,
            "logits_scaling": 2.0,
        },
    ),
    ("starcoder2", "Starcoder2ForCausalLM", {"tie_word_embeddings": True}),
    ("command-r", "CohereForCausalLM", {"logit_scale": 0.3}),
    ("command-r", "CohereForCausalLM", {"use_qk_norm": True}),
]


def rounded(architecture: str, **overrides: Any) -> Any:
    """A small model whose weights are bfloat16's, which the sums that a Gemma's norms are stored as keep whole."""
    model = small_model(architecture, **overrides)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
    return model


def add_fields(writer: GGUFWriter, architecture: str, config: Any) -> None:
    """The metadata that a converter writes for this architecture."""
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    if head_dim != config.hidden_size // config.num_attention_heads or architecture.startswith("gemma"):
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    if architecture != "gemma2":
        writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] == "linear":
        writer.add_string(f"{architecture}.rope.scaling.type", "linear")
        writer.add_rope_scaling_factor(rope["factor"])
    epsilon = {"starcoder2": "norm_epsilon", "command-r": "layer_norm_eps"}.get(architecture)
    if epsilon is None:
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    else:
        writer.add_layer_norm_eps(getattr(config, epsilon))
    if architecture.startswith("gemma"):
        writer.add_sliding_window(config.sliding_window)
        if (cap := config.final_logit_softcapping) is not None:
            writer.add_final_logit_softcapping(cap)
        if (cap := config.attn_logit_softcapping) is not None:
            writer.add_attn_logit_softcapping(cap)
    if architecture == "granite":
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)
    if architecture == "command-r":
        writer.add_logit_scale(config.logit_scale)


def write(path: Path, architecture: str, model: Any, fields: Mapping[str, Any] | None = None) -> Path:
    """`model` as a GGUF file; tensor names by the gguf package's own map. `fields`: more metadata."""
    config = model.config
    writer = GGUFWriter(path, architecture)
    add_fields(writer, architecture, config)
    for name, value in (fields or {}).items():
        if isinstance(value, list):
            writer.add_array(f"{architecture}.{name}", value)
        else:
            writer.add_uint32(f"{architecture}.{name}", value)
    names = get_tensor_name_map(ENUMS[architecture], config.num_hidden_layers)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        module = name.split(".")[-2]
        if architecture in ("llama", "granite") and module in heads:
            # llama.cpp pairs neighbours: row (half, i) of a head becomes row (i, half)
            tensor = tensor.view(heads[module], 2, -1, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)
        if architecture.startswith("gemma") and name.endswith("norm.weight"):
            tensor = tensor + 1
        stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert stored is not None, name
        writer.add_tensor(stored, tensor.contiguous().numpy().astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_every_architecture_has_a_case() -> None:
    assert {architecture for architecture, _, _ in CASES} | {"llama"} == set(ARCHITECTURES)
    assert all(isinstance(ENUMS[name], MODEL_ARCH) for name in ARCHITECTURES)


@pytest.mark.parametrize(
    ("architecture", "family", "overrides"), CASES, ids=[f"{case[0]}-{i}" for i, case in enumerate(CASES)]
)
def test_a_converted_model_equals_its_original(
    tmp_path: Path, architecture: str, family: str, overrides: Overrides
) -> None:
    theirs = rounded(family, **overrides)
    path = write(tmp_path / "m.gguf", architecture, theirs)
    config = GGUFCheckpoint(path).config()
    assert isinstance(transformers.AutoConfig.for_model(**config), type(theirs.config))
    assert config["architectures"] == [family]
    ours = LoadedModel(path, data_type="fp32")
    # longer than the windows
    for prompt in ([5], np.random.default_rng(0).integers(0, 131, 21).tolist()):
        want = oracle(theirs, prompt, 4)
        assert_same("gguf", ours.generate(prompt, 4), want, 1e-4)
        assert_same("in chunks", ours.generate(prompt, 4, chunk=5), want, 1e-4)


def test_the_format_leaves_out_what_gemma_needs(tmp_path: Path) -> None:
    model = rounded("Gemma3ForCausalLM", **SMALL_GEMMA)
    config = GGUFCheckpoint(write(tmp_path / "m.gguf", "gemma3", model)).config()
    assert config["layer_types"] == ["sliding_attention"] * 5 + ["full_attention", "sliding_attention"]
    assert config["query_pre_attn_scalar"] == 8
    assert config["rms_norm_eps"] == 1e-6
    assert config["rope_parameters"]["sliding_attention"]["rope_theta"] == 1e4
    every = {"attention.sliding_window_pattern": 3}
    config = GGUFCheckpoint(write(tmp_path / "n.gguf", "gemma3", model, every)).config()
    assert [kind[:4] for kind in config["layer_types"]] == ["slid", "slid", "full"] * 2 + ["slid"]
    layers = {"attention.sliding_window_pattern": [False, True] * 3 + [False]}
    config = GGUFCheckpoint(write(tmp_path / "o.gguf", "gemma3", model, layers)).config()
    assert [kind[:4] for kind in config["layer_types"]] == ["full", "slid"] * 3 + ["full"]


def test_norms_come_back_as_they_were(tmp_path: Path) -> None:
    theirs = rounded("Gemma3ForCausalLM", **SMALL_GEMMA)
    read = dict(GGUFCheckpoint(write(tmp_path / "m.gguf", "gemma3", theirs)).tensors())
    for name, tensor in theirs.state_dict().items():
        if name in read:
            torch.testing.assert_close(read[name]().float(), tensor, rtol=0, atol=0, msg=name)


def test_what_is_not_read_says_so(tmp_path: Path) -> None:
    model = rounded("Olmo2ForCausalLM", num_key_value_heads=3)
    with pytest.raises(ConfigError, match="is an Olmo 3"):
        GGUFCheckpoint(write(tmp_path / "m.gguf", "olmo2", model, {"attention.sliding_window": 8}))
    sizes = {"attention.key_length": [8, 16, 8]}
    with pytest.raises(ConfigError, match=r"qwen2\.attention\.key_length by layer"):
        GGUFCheckpoint(write(tmp_path / "n.gguf", "qwen2", rounded("Qwen2ForCausalLM"), sizes))
    with pytest.raises(ConfigError, match="architecture 'gemma3n'; GGUF files are read for llama, qwen2, qwen3"):
        GGUFCheckpoint(write_header(tmp_path / "o.gguf", "gemma3n"))


def write_header(path: Path, architecture: str) -> Path:
    """A file of nothing but its architecture."""
    writer = GGUFWriter(path, architecture)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path
