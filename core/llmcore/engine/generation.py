"""Sampling defaults: what a request that leaves them open gets, and where that is from."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from llmcore.errors import ConfigError

FILTERS = ("top_p", "top_k", "min_p", "typical_p")
SAMPLING = ("temperature", *FILTERS, "repetition_penalty")
"""What a generation_config.json says of how tokens are drawn."""


def sampling_defaults(choice: str, own: Mapping[str, Any]) -> dict[str, Any]:
    """The generation config that `--generation_config` means; `own`: the model's. Raises ConfigError.

    With "none", what says how tokens are drawn is left out; what ends an answer stays. Where `do_sample` is false,
    filters of draws mean nothing, as in transformers: the temperature is 0.
    """
    if choice == "auto":
        return _greedy_if_asked(own)
    if choice == "none":
        return {name: value for name, value in own.items() if name not in (*SAMPLING, "do_sample")}
    path = Path(choice).expanduser()
    path = path / "generation_config.json" if path.is_dir() else path
    try:
        found = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.DecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(
            f"--generation_config {choice}: {reason}; give auto, none, or a generation_config.json"
        ) from error
    return _greedy_if_asked(found)


def _greedy_if_asked(given: Mapping[str, Any]) -> dict[str, Any]:
    if given.get("do_sample") is not False:
        return dict(given)
    return {name: value for name, value in given.items() if name not in FILTERS} | {"temperature": 0.0}


def describe(choice: str, generation: Mapping[str, Any]) -> str:
    """The same for people."""
    said = [f"{name} {generation[name]:g}" for name in SAMPLING if isinstance(generation.get(name), (int, float))]
    if choice == "none":
        return "as each API says (--generation_config none)"
    source = "the model's generation_config.json" if choice == "auto" else choice
    if not said:
        return f"as each API says; {source} sets nothing"
    return f"{', '.join(said)} ({source}); the rest as each API says"
