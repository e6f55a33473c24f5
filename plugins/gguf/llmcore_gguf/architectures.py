"""The architectures of GGUF files that are read: what each calls its tensors and fields, and what it leaves out.

A file names its fields "<architecture>.<key>" and its tensors "blk.<layer>.<module>.weight"; both are the format's own
words, and the values here are those of Hugging Face's config.json and checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

Config = dict[str, Any]

OUTER: Mapping[str, str] = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
"""Tensors that belong to no layer. A file without `output` has a head that is the embedding."""

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
"""GGUF key -> config field, of what every file must have."""


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """One architecture. `name`, `model_type`: as config.json has them; `modules`: a layer's GGUF module -> Hugging
    Face's; `required`, `optional`: GGUF key -> config field, beside `SIZES`; `constants`: fields that the format
    lacks; `present`: field -> the tensor of layer 0 that makes it true; `paired`: rows of q and k are stored so that
    rope turns neighbours, not halves; `norm_offset`: what the file adds to the weights of norms; `finish`: fields that
    follow from others (its second argument asks the file for a key); `refused`: GGUF key -> what a value says.
    """

    name: str
    model_type: str
    modules: Mapping[str, str]
    required: Mapping[str, str] = field(default_factory=lambda: {"attention.layer_norm_rms_epsilon": "rms_norm_eps"})
    optional: Mapping[str, str] = field(default_factory=dict)
    constants: Mapping[str, Any] = field(default_factory=lambda: {"hidden_act": "silu"})
    present: Mapping[str, str] = field(default_factory=dict)
    paired: bool = False
    norm_offset: float = 0.0
    finish: Callable[[Config, Callable[[str, Any], Any]], Config] | None = None
    refused: Mapping[str, str] = field(default_factory=dict)


def _gemma_scale(config: Config, layers: int) -> int:
    """What scores are scaled by, before the root: a model of `layers` layers, the 27B one, has a value of its own."""
    if config["num_hidden_layers"] == layers:
        return int(config["hidden_size"] // config["num_attention_heads"])
    return int(config["head_dim"])


def _gemma2(config: Config, get: Callable[[str, Any], Any]) -> Config:
    return {"query_pre_attn_scalar": _gemma_scale(config, 46)}


def _gemma3(config: Config, get: Callable[[str, Any], Any]) -> Config:
    """Windowed layers turn by a base of their own and are not scaled."""
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
    # Mistral's files say llama, too
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
"""By the name in `general.architecture`."""
