"""Rebuilds the model's config.json from the fields of a GGUF file."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np
from llmcore.api import ConfigError

from llmcore_gguf.architectures import ARCHITECTURES, SIZES, Architecture
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
