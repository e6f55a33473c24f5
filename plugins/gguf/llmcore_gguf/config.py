"""Rebuilds the model's config.json from the fields of a GGUF file, for the architectures that are read.

A file names its fields "<architecture>.<key>" and its tensors "blk.<layer>.<module>.weight". These names are the
format's own. The values here are the names of Hugging Face's config.json and checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from llmcore.api import ConfigError

from llmcore_gguf.reader import GGUF

ROPE_FACTORS = "rope_freqs.weight"
"""The tensor of divisors that llama3's rope scaling applies to each frequency."""


def architecture_of(file: GGUF) -> Architecture:
    """Returns the file's architecture. Raises ConfigError for an unknown one."""
    name = str(file.need("general.architecture"))
    if name not in ARCHITECTURES:
        raise ConfigError(
            f"{file.path} holds architecture {name!r}; GGUF files are read for {', '.join(ARCHITECTURES)} only, "
            f"use the model's safetensors"
        )
    return ARCHITECTURES[name]


def read_config(file: GGUF, tensors: Collection[str], vocabulary: int) -> dict[str, Any]:
    """Returns config.json. `tensors`: the file's, by Hugging Face name. `vocabulary`: rows of its embedding.

    Raises ConfigError if a required field is missing, and for values that no family here supports.
    """
    fields = Fields(file)
    kind = architecture_of(file)
    for key, meaning in kind.refused.items():
        if fields.get(key) is not None:
            raise ConfigError(f"{file.path} is {meaning}; use the model's safetensors")
    required = {**SIZES, **kind.required}
    config = {field: fields.number(key) for key, field in required.items()}
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    config |= {
        "architectures": [kind.name],
        "model_type": kind.model_type,
        **kind.constants,
        "vocab_size": vocabulary,
        "num_key_value_heads": fields.number("attention.head_count_kv", heads),
        "head_dim": fields.number("attention.key_length", hidden // heads),
        "tie_word_embeddings": "lm_head.weight" not in tensors,
        "bos_token_id": file.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": file.end_ids(),
        "dtype": "bfloat16",
    }
    if fields.get("attention.value_length", config["head_dim"]) != config["head_dim"]:
        raise ConfigError(f"{file.path} has keys and values of different sizes; use the model's safetensors")
    config |= {field: fields.number(key) for key, field in kind.optional.items() if fields.get(key) is not None}
    config |= {field: f"model.layers.0.{tensor}" in tensors for field, tensor in kind.present.items()}
    config["rope_parameters"] = _rope(fields, config)
    return config if kind.finish is None else config | kind.finish(config, fields.get)


class Fields:
    """The fields of a file's own architecture."""

    def __init__(self, file: GGUF) -> None:
        self.file = file
        self._prefix = str(file.need("general.architecture"))

    def get(self, key: str, default: Any = None) -> Any:
        """Returns a field's value. Numbers are stored as f32 and rounded here: 9.999999747378752e-06 becomes 1e-05."""
        value = self.file.get(f"{self._prefix}.{key}", default)
        return float(str(np.float32(value))) if isinstance(value, float) else value

    def number(self, key: str, default: Any = None) -> Any:
        """Returns a number that all layers share. Raises ConfigError if it is missing or differs between layers."""
        if (value := self.get(key, default)) is None:
            value = self.file.need(f"{self._prefix}.{key}")
        if isinstance(value, list):
            if len(set(value)) != 1:
                raise ConfigError(
                    f"{self.file.path} has {self._prefix}.{key} by layer; only models whose layers are alike are "
                    "read, use the model's safetensors"
                )
            return value[0]
        return value


def _rope(fields: Fields, config: dict[str, Any]) -> dict[str, Any]:
    file = fields.file
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": fields.get("rope.freq_base", 10000.0)}
    size = config["head_dim"]
    if (turned := fields.number("rope.dimension_count", size)) != size:
        raise ConfigError(
            f"{file.path} turns {turned} of the {size} elements of a head; {config['architectures'][0]} turns whole "
            "heads, use the model's safetensors"
        )
    kind = fields.get("rope.scaling.type", "none")
    if kind in ("linear", "yarn"):
        original = fields.get("rope.scaling.original_context_length", config["max_position_embeddings"])
        rope |= {"rope_type": kind, "factor": fields.number("rope.scaling.factor")}
        rope |= {"original_max_position_embeddings": original} if kind == "yarn" else {}
    elif kind != "none":
        raise ConfigError(
            f"{file.path} has rope scaling {kind!r}; known: none, linear, yarn; use the model's safetensors"
        )
    for tensor in file.tensors:
        if tensor.name == ROPE_FACTORS:
            rope |= _llama3(file, rope["rope_theta"], np.asarray(tensor.data, np.float32))
    return rope


def _llama3(file: GGUF, theta: float, factors: np.ndarray[Any, np.dtype[np.float32]]) -> dict[str, Any]:
    """Returns the scaling for the file's factors. Llama 3.1 and later models differ only in the largest factor."""
    guess = {"factor": float(factors.max()), "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    turns = 8192 / (2 * np.pi) * theta ** -(np.arange(len(factors)) / len(factors))
    smooth = np.clip((turns - 1.0) / 3.0, 0, 1)
    if not np.allclose(1 / factors, smooth + (1 - smooth) / guess["factor"], rtol=1e-3):
        raise ConfigError(f"{file.path} scales rope in a way that is not Llama 3's; use safetensors")
    return {"rope_type": "llama3", "original_max_position_embeddings": 8192, **guess}


Config = dict[str, Any]

OUTER: Mapping[str, str] = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
"""Tensors that belong to no layer. In a file without `output` the embedding is also the head."""

ATTENTION: Mapping[str, str] = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}
HEAD_NORMS: Mapping[str, str] = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
GATED: Mapping[str, str] = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
PRE_NORMS: Mapping[str, str] = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
POST_NORMS: Mapping[str, str] = {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
FOUR_NORMS: Mapping[str, str] = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    **POST_NORMS,
}

SIZES: Mapping[str, str] = {
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads",
    "context_length": "max_position_embeddings",
}
"""GGUF key -> config field, for the fields that every file must have."""


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """One architecture. Its keys are those that a file has beside `SIZES`."""

    name: str
    """The architecture's name in config.json."""
    model_type: str
    """The model type in config.json."""
    modules: Mapping[str, str]
    """A layer's module in GGUF -> in Hugging Face's checkpoints."""
    required: Mapping[str, str] = field(default_factory=lambda: {"attention.layer_norm_rms_epsilon": "rms_norm_eps"})
    """GGUF key -> config field. A file without one of the keys is an error."""
    optional: Mapping[str, str] = field(default_factory=dict)
    """GGUF key -> config field."""
    constants: Mapping[str, Any] = field(default_factory=lambda: {"hidden_act": "silu"})
    """Config fields that the format lacks."""
    present: Mapping[str, str] = field(default_factory=dict)
    """Config field -> the tensor of layer 0 whose presence makes it true."""
    paired: bool = False
    """The file stores the rows of q and k such that rope rotates neighbours instead of halves."""
    norm_offset: float = 0.0
    """The number that the file adds to the weights of norms."""
    finish: Callable[[Config, Callable[[str, Any], Any]], Config] | None = None
    """Returns the fields that follow from others. Its second argument reads a key from the file."""
    refused: Mapping[str, str] = field(default_factory=dict)
    """GGUF key -> the kind of model that has the key, if no family supports it."""


def _gemma_scale(config: Config, layers: int) -> int:
    """Returns query_pre_attn_scalar. Only the model with `layers` layers, the 27B one, does not use its head size."""
    if config["num_hidden_layers"] == layers:
        return int(config["hidden_size"] // config["num_attention_heads"])
    return int(config["head_dim"])


def _gemma2(config: Config, get: Callable[[str, Any], Any]) -> Config:
    return {"query_pre_attn_scalar": _gemma_scale(config, 46)}


def _gemma3(config: Config, get: Callable[[str, Any], Any]) -> Config:
    """Windowed layers have a rope base of their own, without scaling."""
    full = {"rope_theta": 1e6, **config["rope_parameters"]}
    windowed = {"rope_type": "default", "rope_theta": get("rope.freq_base_swa", 10000.0)}
    count, pattern = config["num_hidden_layers"], get("attention.sliding_window_pattern", 6)
    if not get("attention.sliding_window", 0):
        windows = [False] * count
    elif isinstance(pattern, list):
        windows = [bool(entry) for entry in pattern[:count]]
    else:
        windows = [bool(index % pattern) for index in range(1, count + 1)]
    return {
        "query_pre_attn_scalar": _gemma_scale(config, 62),
        "rope_parameters": {"full_attention": full, "sliding_attention": windowed},
        "layer_types": ["sliding_attention" if window else "full_attention" for window in windows],
    }


LAYER_NORM = {"attention.layer_norm_epsilon": "layer_norm_eps"}
GEMMA = {"hidden_activation": "gelu_pytorch_tanh"}
CAPS = {
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "attention.sliding_window": "sliding_window",
}
ATTENTION_BIAS = {"attention_bias": "self_attn.q_proj.bias"}
BIASES = {**ATTENTION_BIAS, "mlp_bias": "mlp.down_proj.bias"}

ARCHITECTURES: Mapping[str, Architecture] = {
    # Mistral's files are of the architecture "llama", too
    "llama": Architecture(
        name="LlamaForCausalLM",
        model_type="llama",
        modules={**PRE_NORMS, **ATTENTION, **GATED},
        present=BIASES,
        paired=True,
    ),
    "qwen2": Architecture(
        name="Qwen2ForCausalLM",
        model_type="qwen2",
        modules={**PRE_NORMS, **ATTENTION, **GATED},
    ),
    "qwen3": Architecture(
        name="Qwen3ForCausalLM",
        model_type="qwen3",
        modules={**PRE_NORMS, **ATTENTION, **HEAD_NORMS, **GATED},
        present=ATTENTION_BIAS,
    ),
    "gemma2": Architecture(
        name="Gemma2ForCausalLM",
        model_type="gemma2",
        modules={**FOUR_NORMS, **ATTENTION, **GATED},
        optional=CAPS,
        constants=GEMMA,
        norm_offset=1.0,
        finish=_gemma2,
    ),
    "gemma3": Architecture(
        name="Gemma3ForCausalLM",
        model_type="gemma3_text",
        modules={**FOUR_NORMS, **ATTENTION, **HEAD_NORMS, **GATED},
        optional=CAPS,
        constants=GEMMA,
        norm_offset=1.0,
        finish=_gemma3,
    ),
    "olmo2": Architecture(
        name="Olmo2ForCausalLM",
        model_type="olmo2",
        modules={**POST_NORMS, **ATTENTION, **HEAD_NORMS, **GATED},
        present=ATTENTION_BIAS,
        refused={"attention.sliding_window": "an Olmo 3, whose windows are not known"},
    ),
    "granite": Architecture(
        name="GraniteForCausalLM",
        model_type="granite",
        modules={**PRE_NORMS, **ATTENTION, **GATED},
        optional={
            "attention.scale": "attention_multiplier",
            "embedding_scale": "embedding_multiplier",
            "residual_scale": "residual_multiplier",
            "logit_scale": "logits_scaling",
        },
        present=BIASES,
        paired=True,
    ),
    "starcoder2": Architecture(
        name="Starcoder2ForCausalLM",
        model_type="starcoder2",
        modules={**PRE_NORMS, **ATTENTION, "ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
        required={"attention.layer_norm_epsilon": "norm_epsilon"},
        constants={"hidden_act": "gelu_pytorch_tanh"},
        present={"use_bias": "self_attn.o_proj.bias"},
    ),
    "command-r": Architecture(
        name="CohereForCausalLM",
        model_type="cohere",
        modules={"attn_norm": "input_layernorm", **ATTENTION, **HEAD_NORMS, **GATED},
        required={**LAYER_NORM, "logit_scale": "logit_scale"},
        present={**ATTENTION_BIAS, "use_qk_norm": "self_attn.q_norm.weight"},
    ),
}
"""Architectures by the file's `general.architecture`."""
