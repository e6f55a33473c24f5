"""Checkpoints as Hugging Face saves them: config.json beside *.safetensors files and, if several, their index."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from llmcore.api.errors import ConfigError

if TYPE_CHECKING:
    import torch

INDEX = "model.safetensors.index.json"

QUANTIZATION_FILES = {"quantize_config.json": "gptq", "quant_config.json": "awq", "hf_quant_config.json": "modelopt"}
"""The file in which a tool describes the weights that it quantized -> the name of its `quant_method`."""

Sizes = dict[str, tuple[tuple[int, ...], str]]


def sniff(path: Path) -> bool:
    """True if `path` is a directory with a config.json and safetensors files."""
    return (path / "config.json").is_file() and any(path.glob("*.safetensors*"))


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file of a model directory. Raises ConfigError if the file does not hold one."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}; check the path and its permissions") from error
    except ValueError as error:
        raise ConfigError(f"{path} is no JSON ({error}); download it again") from error
    except RecursionError as error:
        raise ConfigError(f"{path} is nested too deeply to be read; download it again") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} holds no JSON object; download it again")
    return value


def read_config(path: Path) -> dict[str, Any]:
    """config.json in directory `path`, whose `quantization_config` may come from another place.

    It may have the older name `compression_config`, be part of `text_config`, or be a file of its own (see
    `QUANTIZATION_FILES`), which gets a `quant_method` if it does not name one. Raises ConfigError for a broken file.
    """
    config = read_json(path / "config.json")
    text = config.get("text_config")
    found = config.get("quantization_config") or config.get("compression_config")
    found = found or (isinstance(text, dict) and text.get("quantization_config"))
    for name, method in QUANTIZATION_FILES.items():
        if not found and (path / name).is_file():
            found = {"quant_method": method, **read_json(path / name)}
    return {**config, "quantization_config": found} if found else config


class SafetensorsCheckpoint:
    """A protocols.Checkpoint. It maps tensors from their files, in the order in which the files store them.

    The constructor reads and checks every header. Raises ConfigError that names the broken file and says what to do.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._config = read_config(path)
        self._files = {file: read_header(file) for file in _files(path)}
        self._sizes: Sizes = {}
        for file, sizes in self._files.items():
            if doubled := self._sizes.keys() & sizes.keys():
                raise ConfigError(f"{file} holds {min(doubled)}, and so does another file; remove one of them")
            self._sizes.update(sizes)

    def config(self) -> dict[str, Any]:
        """The content of config.json."""
        return dict(self._config)

    def generation_config(self) -> dict[str, Any]:
        """The content of generation_config.json, or {} without that file."""
        file = self.path / "generation_config.json"
        return read_json(file) if file.is_file() else {}

    def sizes(self) -> Mapping[str, tuple[tuple[int, ...], str]]:
        """Tensor name -> (shape, safetensors' name of the dtype)."""
        return self._sizes

    def tensors(self) -> Iterator[tuple[str, Callable[[], torch.Tensor]]]:
        """Each tensor's name with a function that reads it. The function works until the caller asks for the next."""
        for path, sizes in self._files.items():
            try:
                with safe_open(path, framework="pt") as file:
                    for name in sizes:
                        yield name, partial(file.get_tensor, name)
            except SafetensorError as error:
                raise ConfigError(f"{path} cannot be read: {error}; download it again") from error


def read_header(path: Path) -> Sizes:
    """(shape, dtype) by name, in the order of the file's bytes. Raises ConfigError for a truncated or broken file."""
    try:
        with safe_open(path, framework="np") as file:
            tensors = {name: file.get_slice(name) for name in file.offset_keys()}
            return {name: (tuple(tensor.get_shape()), tensor.get_dtype()) for name, tensor in tensors.items()}
    except SafetensorError as error:
        raise ConfigError(f"{path} is cut short or is not a safetensors file ({error}); download it again") from error


def _files(path: Path) -> list[Path]:
    """The files that the index names, or all safetensors files of a directory without an index."""
    if not (path / INDEX).is_file():
        return sorted(path.glob("*.safetensors"))
    index = read_json(path / INDEX).get("weight_map")
    if not isinstance(index, dict) or not all(isinstance(name, str) for name in index.values()):
        raise ConfigError(f"{path / INDEX} has no weight_map; download it again")
    # Drop folders from the names: an index must not lead to a file outside the model's directory.
    files = [path / os.path.basename(name) for name in sorted(set(index.values()))]
    if missing := [file.name for file in files if not file.is_file()]:
        raise ConfigError(f"{path} lacks {', '.join(missing)}, named in {INDEX}; download what is missing")
    return files
