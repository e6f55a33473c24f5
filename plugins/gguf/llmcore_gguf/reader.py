"""Opens a GGUF file and reads its metadata."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader, ReaderTensor
from llmcore.api import ConfigError

MAGIC = b"GGUF"


def sniff(path: Path) -> bool:
    """True if `path` is a GGUF file or a directory with one in it."""
    if path.is_file():
        with path.open("rb") as file:
            return file.read(4) == MAGIC
    return path.is_dir() and any(path.glob("*.gguf"))


class _Reader(GGUFReader):
    """The library's reader, but with slices that are plain arrays. Slicing an `np.memmap` takes three times as long,
    and a vocabulary has a hundred thousand slices."""

    @property  # type: ignore[override]
    def data(self) -> np.ndarray[Any, Any]:
        """Returns the whole file, mapped."""
        return self._data

    @data.setter
    def data(self, mapped: np.ndarray[Any, Any]) -> None:
        self._data = np.asarray(mapped)


class GGUF:
    """One open file. `get` reads metadata. `tensors` are mapped and not read."""

    def __init__(self, path: Path) -> None:
        self.path = _file(path)
        try:
            self._reader = _Reader(self.path)
        except (ValueError, IndexError, KeyError, OverflowError) as error:
            raise ConfigError(f"{self.path} is cut short or broken ({error}); download it again") from error
        self.tensors: list[ReaderTensor] = self._reader.tensors
        if self.get("split.count", 1) > 1:
            raise ConfigError(f"{self.path} is one part of a split model; join it with llama-gguf-split --merge")

    def get(self, key: str, default: Any = None) -> Any:
        """Returns the value of a metadata key, or the default."""
        field = self._reader.get_field(key)
        return default if field is None else field.contents()

    def need(self, key: str) -> Any:
        """Returns the value of a metadata key. Raises ConfigError if the file lacks it."""
        if (value := self.get(key)) is None:
            raise ConfigError(f"{self.path} has no {key}; it is not a complete model, download another conversion")
        return value

    def end_ids(self) -> list[int]:
        """The token ids that end an answer: the file's own, and other control tokens that are known to end one."""
        own = [self.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
        kinds = self.get("tokenizer.ggml.token_type", [])
        texts = self.get("tokenizer.ggml.tokens", [])
        others = [i for i, kind in enumerate(kinds) if kind == CONTROL and texts[i] in END_TEXTS]
        return list(dict.fromkeys([i for i in own if i is not None] + others))


NORMAL, CONTROL, USER_DEFINED = 1, 3, 4
"""The format's token types: vocabulary, marks that users cannot write, and texts that are always one token."""

END_TEXTS = frozenset(
    {
        "<|endoftext|>",
        "<|im_end|>",
        "<|end_of_text|>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<|end|>",
        "</s>",
        "<end_of_turn>",
    }
)
"""Tokens that end a turn or a text. A file names one of them as its end token, but its model may emit another."""


def _file(path: Path) -> Path:
    if path.is_file():
        return path
    files = sorted(path.glob("*.gguf"))
    if len(files) == 1:
        return files[0]
    names = ", ".join(file.name for file in files)
    raise ConfigError(f"{path} holds {len(files)} GGUF files ({names}); give --model_dir the one to load")
