"""The fake model's config, its answers, and the files of its directory. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from llmcore.api import KVGroupSpec, ModelConfig, WeightMap
from safetensors.numpy import save_file

from llmcore_devtools.faults import fault_texts
from llmcore_devtools.tokenizer import TEMPLATE, write_tokenizer

GROUP = "kv"
_WIDTH = 4


@dataclass(frozen=True, kw_only=True)
class FakeConfig(ModelConfig):
    """The fake model's config. `step_delay`: seconds per forward. `faults`: name (see `faults`) -> its token."""

    step_delay: float = 0.0
    faults: Mapping[str, int] = field(default_factory=dict)


def read_config(config: Mapping[str, Any]) -> FakeConfig:
    """ModelSpec.read_config."""
    group = KVGroupSpec(name=GROUP, layers=(0,), kv_heads=1, key_size=_WIDTH, value_size=_WIDTH)
    return FakeConfig(
        architecture="LlmcoreFake",
        vocab_size=config["vocab_size"],
        hidden_size=_WIDTH + 1,
        num_layers=1,
        max_position=config["max_position_embeddings"],
        dtype="f32",
        eos_ids=(config["eos_token_id"],),
        kv_groups=(group,),
        step_delay=config.get("step_delay", 0.0),
        faults=config.get("faults", {}),
    )


def weights(config: FakeConfig) -> WeightMap:
    """ModelSpec.weights: the checkpoint and the parameters have the same names."""
    return WeightMap()


MODULUS = (1 << 31) - 1
ANSWERS = 94
"""Answers are ids 0 to 93: the printable characters of `write_tokenizer`."""
_SALT = 7
_WITH_TOOLS = "{% if tools %}{{ tools | tojson }}{% endif %}"


def fake_answer(prompt: Sequence[int], n: int, salt: int = _SALT) -> list[int]:
    """The first `n` tokens that greedy decoding gives after `prompt`, in plain Python."""
    total = sum(mix(token, at) for at, token in enumerate(prompt))
    answer: list[int] = []
    for at in range(len(prompt), len(prompt) + n):
        answer.append((total * 48271 + salt) % MODULUS % ANSWERS)
        total += mix(answer[-1], at)
    return answer


def write_fake_model(directory: Path, *, max_position: int = 4096, all_faults: bool = False, **config: Any) -> Path:
    """Write a model directory with config, weights, tokenizer and chat template; returns `directory`.

    `config`: further fields of FakeConfig, for example `step_delay`, or `faults={"nan": 13}` for a fault that token 13
    brings. `all_faults`: give every fault of `llmcore_devtools.faults` tokens of its own.
    """
    write_tokenizer(directory, more=fault_texts() if all_faults else ())
    tokenizer = orjson.loads((directory / "tokenizer.json").read_bytes())
    added = [token["id"] for token in tokenizer["added_tokens"] if token["content"] == "<|im_end|>"]
    if all_faults:
        (directory / "chat_template.jinja").write_text(_WITH_TOOLS + TEMPLATE, encoding="utf-8")
        ids = {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
        config["faults"] = {text[2:-2].removeprefix("fault:"): ids[text] for text in fault_texts()}
    values = {
        "architectures": ["LlmcoreFake"],
        "vocab_size": max(len(tokenizer["model"]["vocab"]), *(token["id"] + 1 for token in tokenizer["added_tokens"])),
        "max_position_embeddings": max_position,
        "torch_dtype": "float32",
        "eos_token_id": added[0],
        **config,
    }
    (directory / "config.json").write_bytes(orjson.dumps(values))
    save_file({"salt": np.array([_SALT], np.float32)}, directory / "model.safetensors")
    return directory


def mix(token: Any, position: Any) -> Any:
    """One token's share of the hash, for numbers and for tensors."""
    return ((token + 1) * (position + 7) * 40503 + token * 69069) % MODULUS
