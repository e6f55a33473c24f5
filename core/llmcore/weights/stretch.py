"""`--rope_scaling_factor`: read a model as if its config asked for dynamic NTK scaling."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from llmcore.api.errors import ConfigError
from llmcore.api.models import ModelConfig
from llmcore.api.specs import ModelSpec
from llmcore.config import Config
from llmcore.registry.registry import Registry
from llmcore.weights.source import read_model


def read_model_as_set(registry: Registry, hf: Mapping[str, Any], config: Config) -> tuple[ModelSpec, ModelConfig]:
    """`read_model` with `--data_type` and `--rope_scaling_factor` applied. Raises ConfigError.

    A stretched model takes requests up to its original length times the factor, or up to `--max_req_total_len` if
    that is longer.
    """
    factor = config.model.rope_scaling_factor
    if not factor:
        return read_model(registry, hf, config.model.data_type)
    family, model = read_model(registry, stretched(hf, factor), config.model.data_type)
    if model.fixed_angles_up_to is None:
        raise ConfigError(
            f"--rope_scaling_factor {factor:g}: the positions of {model.architecture} cannot be stretched; "
            "leave it out"
        )
    longest = max(model.max_position, model.fixed_angles_up_to, config.memory.max_req_total_len or 0)
    return family, replace(model, max_position=longest)


def stretched(hf: Mapping[str, Any], factor: float) -> dict[str, Any]:
    """`hf`, a Hugging Face config, with dynamic NTK scaling added. Raises ConfigError if it has a scaling already."""
    inner = hf.get("text_config")
    if isinstance(inner, Mapping):
        return {**hf, "text_config": stretched(inner, factor)}
    present = hf.get("rope_scaling") or hf.get("rope_parameters") or {}
    if any(isinstance(value, Mapping) for value in present.values()):
        raise ConfigError(
            f"--rope_scaling_factor {factor:g}: this model's layers have positions of several kinds; leave it out"
        )
    kind = present.get("rope_type") or present.get("type") or "default"
    if kind != "default":
        raise ConfigError(
            f"--rope_scaling_factor {factor:g}: the model's config has a rope scaling of its own, {kind}; leave it out"
        )
    scaling = {**{k: v for k, v in present.items() if k != "type"}, "rope_type": "dynamic", "factor": factor}
    return {**hf, "rope_scaling": scaling, "rope_parameters": scaling}
