"""Checkpoints as Hugging Face saves them: config.json beside one *.safetensors file or an index of several."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from llmcore.errors import ConfigError

if TYPE_CHECKING:
    import torch

INDEX = "model.safetensors.index.json"
LONGEST_HEADER = 100_000_000
"""Bytes; safetensors' own limit."""

Sizes = dict[str, tuple[tuple[int, ...], str]]


def sniff(path: Path) -> bool:
    """Whether this is a directory with a config.json and safetensors files."""
    return (path / "config.json").is_file() and any(path.glob("*.safetensors*"))


def open_checkpoint(path: Path) -> SafetensorsCheckpoint:
    """Reads and checks every header; ConfigError names the file that is broken and what to do."""
    return SafetensorsCheckpoint(path)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file of a model directory; ConfigError if it is none."""
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


class SafetensorsCheckpoint:
    """A protocols.Checkpoint. Tensors are mapped from their files, in the order in which they lie there."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._config = read_json(path / "config.json")
        self._files = {file: read_header(file) for file in _files(path)}
        self._sizes: Sizes = {}
        for file, sizes in self._files.items():
            if doubled := self._sizes.keys() & sizes.keys():
                raise ConfigError(f"{file} holds {min(doubled)}, and so does another file; remove one of them")
            self._sizes.update(sizes)

    def config(self) -> dict[str, Any]:
        """config.json."""
        return dict(self._config)

    def generation_config(self) -> dict[str, Any]:
        """generation_config.json, or {}."""
        file = self.path / "generation_config.json"
        return read_json(file) if file.is_file() else {}

    def sizes(self) -> Mapping[str, tuple[tuple[int, ...], str]]:
        """(shape, dtype as safetensors names it) by tensor name."""
        return self._sizes

    def tensors(self) -> Iterator[tuple[str, Callable[[], torch.Tensor]]]:
        """Every tensor's name with a function that reads it, good until the next one is asked for."""
        for path, sizes in self._files.items():
            try:
                with safe_open(path, framework="pt") as file:
                    for name in sizes:
                        yield name, partial(file.get_tensor, name)
            except SafetensorError as error:
                raise ConfigError(f"{path} cannot be read: {error}; download it again") from error


def read_header(path: Path) -> Sizes:
    """(shape, dtype) by name, in the order of the file's bytes; ConfigError if the file is cut short or broken."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, LONGEST_HEADER):
            raise ConfigError(f"{path} is cut short or no safetensors file ({size} bytes); download it again")
        try:
            header = json.loads(file.read(length))
            header.pop("__metadata__", None)
            spans: dict[str, list[int]] = {name: entry["data_offsets"] for name, entry in header.items()}
            names = sorted(spans, key=lambda name: spans[name])
            sizes = {name: (tuple(header[name]["shape"]), header[name]["dtype"]) for name in names}
            end = max((last for _, last in spans.values()), default=0)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ConfigError(f"{path} has a broken header; download it again") from error
    if 8 + length + end != size:
        raise ConfigError(f"{path} should hold {8 + length + end} bytes and holds {size}; download it again")
    return sizes


def _files(path: Path) -> list[Path]:
    """The files an index names, or all of a directory without one."""
    if not (path / INDEX).is_file():
        return sorted(path.glob("*.safetensors"))
    index = read_json(path / INDEX).get("weight_map")
    if not isinstance(index, dict) or not all(isinstance(name, str) for name in index.values()):
        raise ConfigError(f"{path / INDEX} has no weight_map; download it again")
    # an index names files beside it, never a path elsewhere
    files = [path / os.path.basename(name) for name in sorted(set(index.values()))]
    if missing := [file.name for file in files if not file.is_file()]:
        raise ConfigError(f"{path} lacks {', '.join(missing)}, named in {INDEX}; download what is missing")
    return files
