"""A GGUF file as a checkpoint: config and names in Hugging Face's terms, weights dequantized to bfloat16."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import ReaderTensor
from gguf.quants import dequantize
from llmcore.api import ConfigError

from llmcore_gguf.reader import GGUF

NAMES: Mapping[str, str] = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""The format's names of a llama's tensors."""

ROPE_FACTORS = "rope_freqs.weight"
"""What llama3's rope scaling divides each frequency by."""

CHUNK = 1 << 20
"""Elements dequantized at a time, so that their f32 form stays small."""


class GGUFCheckpoint:
    """A protocols.Checkpoint over one GGUF file of architecture `llama`."""

    def __init__(self, path: Path) -> None:
        self._file = GGUF(path)
        self._architecture = str(self._file.need("general.architecture"))
        if self._architecture != "llama":
            raise ConfigError(
                f"{self._file.path} holds architecture {self._architecture!r}; GGUF files are read for 'llama' only, "
                f"use the model's safetensors"
            )
        self._tensors = {_name(t.name): t for t in self._file.tensors if t.name != ROPE_FACTORS}
        for tensor in self._file.tensors:
            _check_type(self._file.path, tensor)
        self._config = self._read_config()

    def config(self) -> dict[str, Any]:
        """What config.json of the original would say."""
        return dict(self._config)

    def generation_config(self) -> dict[str, Any]:
        """First and last tokens."""
        bos = self._file.get("tokenizer.ggml.bos_token_id")
        return {"bos_token_id": bos, "eos_token_id": self._file.end_ids()}

    def sizes(self) -> Mapping[str, tuple[tuple[int, ...], str]]:
        """(shape, quantization type) by Hugging Face name."""
        return {name: (_shape(tensor), tensor.tensor_type.name) for name, tensor in self._tensors.items()}

    def tensors(self) -> Iterator[tuple[str, Callable[[], torch.Tensor]]]:
        """Every tensor in bfloat16, rows of q and k back in Hugging Face's order."""
        heads = {"q_proj": self._config["num_attention_heads"], "k_proj": self._config["num_key_value_heads"]}
        for name, tensor in self._tensors.items():
            yield name, partial(_read, tensor, heads.get(name.split(".")[-2]))

    def _read_config(self) -> dict[str, Any]:
        heads = self._key("attention.head_count")
        embedding = self._key("embedding_length")
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_act": "silu",
            "vocab_size": _shape(self._tensors["model.embed_tokens.weight"])[0],
            "hidden_size": embedding,
            "intermediate_size": self._key("feed_forward_length"),
            "num_hidden_layers": self._key("block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": self._key("attention.head_count_kv", heads),
            "head_dim": self._key("attention.key_length", embedding // heads),
            "max_position_embeddings": self._key("context_length"),
            # stored as f32: 9.999999747378752e-06 was 1e-05
            "rms_norm_eps": float(f"{self._key('attention.layer_norm_rms_epsilon'):.6g}"),
            "rope_parameters": self._rope(),
            "attention_bias": "model.layers.0.self_attn.q_proj.bias" in self._tensors,
            "mlp_bias": "model.layers.0.mlp.down_proj.bias" in self._tensors,
            "tie_word_embeddings": "lm_head.weight" not in self._tensors,
            "bos_token_id": self._file.get("tokenizer.ggml.bos_token_id"),
            "eos_token_id": self._file.end_ids(),
            "dtype": "bfloat16",
        }

    def _rope(self) -> dict[str, Any]:
        rope: dict[str, Any] = {"rope_type": "default", "rope_theta": self._key("rope.freq_base", 10000.0)}
        head_size = self._key(
            "attention.key_length", self._key("embedding_length") // self._key("attention.head_count")
        )
        rope["partial_rotary_factor"] = self._key("rope.dimension_count", head_size) / head_size
        kind = self._key("rope.scaling.type", "none")
        if kind in ("linear", "yarn"):
            original = self._key("rope.scaling.original_context_length", self._key("context_length"))
            rope |= {"rope_type": kind, "factor": self._key("rope.scaling.factor")}
            rope |= {"original_max_position_embeddings": original} if kind == "yarn" else {}
        elif kind != "none":
            raise ConfigError(f"{self._file.path} has rope scaling {kind!r}; known: none, linear, yarn")
        for tensor in self._file.tensors:
            if tensor.name == ROPE_FACTORS:
                rope |= self._llama3(rope["rope_theta"], np.asarray(tensor.data, np.float32))
        return rope

    def _llama3(self, theta: float, factors: np.ndarray[Any, np.dtype[np.float32]]) -> dict[str, Any]:
        """The scaling whose factors the file holds; Llama 3.1 and later differ only in the largest."""
        guess = {"factor": float(factors.max()), "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        turns = 8192 / (2 * np.pi) * theta ** -(np.arange(len(factors)) / len(factors))
        smooth = np.clip((turns - 1.0) / 3.0, 0, 1)
        if not np.allclose(1 / factors, smooth + (1 - smooth) / guess["factor"], rtol=1e-3):
            raise ConfigError(f"{self._file.path} scales rope in a way that is not Llama 3's; use safetensors")
        return {"rope_type": "llama3", "original_max_position_embeddings": 8192, **guess}

    def _key(self, name: str, default: Any = None) -> Any:
        key = f"{self._architecture}.{name}"
        return self._file.need(key) if default is None else self._file.get(key, default)


def _name(name: str) -> str:
    """A tensor's Hugging Face name; ConfigError for one that a llama does not have."""
    found = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", name)
    if found is None or found[2] not in NAMES:
        raise ConfigError(f"GGUF tensor {name!r} belongs to no dense llama; use the model's safetensors")
    layer = "" if found[1] is None else f"model.layers.{found[1]}."
    return f"{layer}{NAMES[found[2]]}.{found[3]}"


def _shape(tensor: ReaderTensor) -> tuple[int, ...]:
    """Rows first, as torch has it."""
    return tuple(int(n) for n in reversed(tensor.shape))


def _check_type(path: Path, tensor: ReaderTensor) -> None:
    try:
        dequantize(tensor.data[:0] if tensor.data.ndim < 2 else tensor.data[:1], tensor.tensor_type)
    except NotImplementedError as error:
        kind = tensor.tensor_type.name
        raise ConfigError(
            f"{path}: {tensor.name} is of type {kind}, which cannot be read; use another file"
        ) from error


def _read(tensor: ReaderTensor, heads: int | None) -> torch.Tensor:
    """The whole tensor in bfloat16."""
    shape = _shape(tensor)
    out = torch.empty(shape, dtype=torch.bfloat16)
    if len(shape) == 1:
        out.copy_(torch.from_numpy(np.array(dequantize(tensor.data, tensor.tensor_type)).reshape(shape)))
    else:
        rows = max(1, CHUNK // shape[-1])
        for first in range(0, shape[0], rows):
            part = dequantize(tensor.data[first : first + rows], tensor.tensor_type)
            out[first : first + rows] = torch.from_numpy(np.array(part)).reshape(-1, *shape[1:])
    return out if heads is None else _pairs_to_halves(out, heads)


def _pairs_to_halves(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """llama.cpp rotates neighbouring elements of a head, Hugging Face its two halves: put the rows back."""
    paired = rows.view(heads, -1, 2, *rows.shape[1:])
    return paired.transpose(1, 2).reshape(rows.shape)
