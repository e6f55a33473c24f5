"""Names of data types: the six of `--data_type`, and those in a checkpoint's config. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llmcore.api.errors import ConfigError
from llmcore.api.specs import DType
from llmcore.config import DATA_TYPES


def data_type(name: str) -> DType:
    """The type called `name`. Raises ConfigError that lists the known names."""
    if name not in DATA_TYPES:
        raise ConfigError(f"data type {name!r} is not known; use one of {', '.join(DATA_TYPES)}")
    return DATA_TYPES[name]


def read_dtype(hf: Mapping[str, Any]) -> DType:
    """The type that a Hugging Face config names as `dtype` or, if it is older, as `torch_dtype`; f32 by default."""
    return data_type(str(hf.get("dtype") or hf.get("torch_dtype") or "float32").removeprefix("torch."))
