"""Opens a GGUF file as a checkpoint: config and names in Hugging Face's terms, weights dequantized to bf16."""

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

from llmcore_gguf.config import OUTER, ROPE_FACTORS, Architecture, architecture_of, read_config
from llmcore_gguf.reader import GGUF

EMBEDDING = "model.embed_tokens.weight"

CHUNK = 1 << 20
"""Elements that are dequantized at a time. It keeps their f32 form small."""


class GGUFCheckpoint:
    """A protocols.Checkpoint over one GGUF file of an architecture in `ARCHITECTURES`."""

    def __init__(self, path: Path) -> None:
        self._file = GGUF(path)
        self._kind = architecture_of(self._file)
        tensors = [tensor for tensor in self._file.tensors if tensor.name != ROPE_FACTORS]
        self._tensors = {_name(self._file.path, self._kind, tensor.name): tensor for tensor in tensors}
        for tensor in tensors:
            _check_type(self._file.path, tensor)
        if EMBEDDING not in self._tensors:
            raise ConfigError(f"{self._file.path} has no embedding; it is not a whole model, use another file")
        self._config = read_config(self._file, self._tensors, _shape(self._tensors[EMBEDDING])[0])

    def config(self) -> dict[str, Any]:
        """Returns the config.json that the original model had."""
        return dict(self._config)

    def generation_config(self) -> dict[str, Any]:
        """Returns the ids of the first token and of the end tokens."""
        bos = self._file.get("tokenizer.ggml.bos_token_id")
        return {"bos_token_id": bos, "eos_token_id": self._file.end_ids()}

    def sizes(self) -> Mapping[str, tuple[tuple[int, ...], str]]:
        """Returns Hugging Face name -> (shape, quantization type)."""
        return {name: (_shape(tensor), tensor.tensor_type.name) for name, tensor in self._tensors.items()}

    def tensors(self) -> Iterator[tuple[str, Callable[[], torch.Tensor]]]:
        """Yields every tensor in bf16, as Hugging Face stores it."""
        config, kind = self._config, self._kind
        heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
        for name, tensor in self._tensors.items():
            module = name.split(".")[-2]
            paired = heads.get(module) if kind.paired else None
            yield name, partial(_read, tensor, paired, kind.norm_offset if module.endswith("norm") else 0.0)


def _name(path: Path, kind: Architecture, name: str) -> str:
    """Returns a tensor's Hugging Face name. Raises ConfigError if the architecture does not have the tensor."""
    found = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", name)
    known = {} if found is None else OUTER if found[1] is None else kind.modules
    if found is None or found[2] not in known:
        raise ConfigError(f"{path}: tensor {name!r} belongs to no dense {kind.name}; use the model's safetensors")
    layer = "" if found[1] is None else f"model.layers.{found[1]}."
    return f"{layer}{known[found[2]]}.{found[3]}"


def _shape(tensor: ReaderTensor) -> tuple[int, ...]:
    """Returns the shape with rows first, as in torch."""
    return tuple(int(n) for n in reversed(tensor.shape))


def _check_type(path: Path, tensor: ReaderTensor) -> None:
    try:
        dequantize(tensor.data[:0] if tensor.data.ndim < 2 else tensor.data[:1], tensor.tensor_type)
    except NotImplementedError as error:
        kind = tensor.tensor_type.name
        raise ConfigError(
            f"{path}: {tensor.name} is of type {kind}, which cannot be read; use another file"
        ) from error


def _read(tensor: ReaderTensor, heads: int | None, offset: float) -> torch.Tensor:
    """Returns the whole tensor in bf16. `heads`: number of heads if the rows are paired, else None. `offset`:
    subtracted from the values."""
    shape = _shape(tensor)
    out = torch.empty(shape, dtype=torch.bfloat16)
    if len(shape) == 1:
        values = np.array(dequantize(tensor.data, tensor.tensor_type)).reshape(shape)
        out.copy_(torch.from_numpy(values - np.float32(offset)))
    else:
        rows = max(1, CHUNK // shape[-1])
        for first in range(0, shape[0], rows):
            part = dequantize(tensor.data[first : first + rows], tensor.tensor_type)
            out[first : first + rows] = torch.from_numpy(np.array(part)).reshape(-1, *shape[1:])
    return out if heads is None else _pairs_to_halves(out, heads)


def _pairs_to_halves(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """Reorders rows: llama.cpp rotates neighbouring elements of a head, Hugging Face the head's two halves."""
    paired = rows.view(heads, -1, 2, *rows.shape[1:])
    return paired.transpose(1, 2).reshape(rows.shape)
