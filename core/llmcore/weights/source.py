"""Open the checkpoint at `--model_dir`, and find the model family for its config."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmcore.api.errors import ConfigError
from llmcore.api.models import ModelConfig, data_type
from llmcore.api.protocols import Checkpoint
from llmcore.api.specs import ModelSpec, WeightLoaderSpec
from llmcore.config import Config
from llmcore.registry.loader import load
from llmcore.registry.registry import Registry, either_of
from llmcore.weights.map import Sizes, WeightMap
from llmcore.weights.safetensors import SafetensorsCheckpoint

if TYPE_CHECKING:
    import torch


def open_checkpoint(registry: Registry, path: Path, *, weights: bool = True) -> Checkpoint:
    """Open the checkpoint at `path` with the one loader that recognises it.

    `weights`: False if a config.json alone is enough. Raises ConfigError that says what is wrong with the directory
    and what to do.
    """
    spec = find_loader(registry, path, weights=weights)
    if spec is None:
        return SafetensorsCheckpoint(path)
    checkpoint: Checkpoint = load(spec.open)(path)
    return checkpoint


def find_loader(registry: Registry, path: Path, *, weights: bool = True) -> WeightLoaderSpec | None:
    """The one loader that recognises `path`; None if `path` has only a config.json and `weights` is False.

    Does not open the checkpoint, so a file may still turn out to be broken. Raises ConfigError as `open_checkpoint`.
    """
    if not path.exists():
        raise ConfigError(f"{path} does not exist; give --model_dir the directory of a model")
    found = [(spec, plugin) for spec, plugin in registry.specs(WeightLoaderSpec) if load(spec.sniff)(path)]
    if len(found) > 1:
        raise ConfigError(f"{path} is recognised by {either_of(found)}, or give the file itself")
    if found:
        return found[0][0]
    if not weights and (path / "config.json").is_file():
        return None
    raise ConfigError(_what_is_wrong(path, registry))


def outputs_first(checkpoint: Checkpoint, names: WeightMap) -> Checkpoint:
    """The checkpoint with the matrices that `names` transposes as [outputs, inputs], like all others."""
    return OutputsFirst(checkpoint, names) if names.transpose else checkpoint


@dataclass(frozen=True)
class OutputsFirst:
    """A protocols.Checkpoint over another one, of whose matrices `names` transposes some."""

    inner: Checkpoint
    names: WeightMap

    def config(self) -> dict[str, Any]:
        """The content of config.json."""
        return self.inner.config()

    def generation_config(self) -> dict[str, Any]:
        """The content of generation_config.json, or {} without that file."""
        return self.inner.generation_config()

    def sizes(self) -> Sizes:
        """(shape, dtype) by tensor name."""
        return {name: (self._shape(name, shape), dtype) for name, (shape, dtype) in self.inner.sizes().items()}

    def tensors(self) -> Iterator[tuple[str, Callable[[], torch.Tensor]]]:
        """Each tensor's name with a function that reads it. The function works until the caller asks for the next."""
        for name, read in self.inner.tensors():
            yield name, partial(_turned, read) if self.names.transposes(name) else read

    def _shape(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        return (*shape[:-2], shape[-1], shape[-2]) if self.names.transposes(name) and len(shape) > 1 else shape


def _turned(read: Callable[[], torch.Tensor]) -> torch.Tensor:
    tensor = read()
    return tensor.transpose(-1, -2) if tensor.dim() > 1 else tensor


def read_model(registry: Registry, hf: Mapping[str, Any], dtype: str | None = None) -> tuple[ModelSpec, ModelConfig]:
    """The family for a Hugging Face config, and the ModelConfig that it reads from that.

    `dtype`: a value of `--data_type`, which replaces the config's type. Raises ConfigError.
    """
    architectures = hf.get("architectures") or []
    if not isinstance(architectures, list):
        raise ConfigError(f"architectures in the model's config.json is {architectures!r} and has to be a list")
    spec = registry.model_for(architectures)
    try:
        config: ModelConfig = load(spec.read_config)(hf)
    except KeyError as error:
        raise ConfigError(f"the model's config lacks {error}, which {architectures[0]} needs") from error
    except (ArithmeticError, AttributeError, TypeError, ValueError) as error:
        empty = ", ".join(sorted(name for name, value in hf.items() if value is None))
        raise ConfigError(
            f"the model's config.json does not suit {architectures[0]} ({type(error).__name__}: {error}); "
            f"compare it with the original{f', above all what is null here: {empty}' if empty else ''}"
        ) from error
    _check_sizes(config)
    return spec, config if dtype is None else replace(config, dtype=data_type(dtype))


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


def _check_sizes(config: ModelConfig) -> None:
    """Raise ConfigError for values that no model has, before code divides by them or allocates by them."""
    sizes = {name: getattr(config, name) for name in ("vocab_size", "hidden_size", "num_layers", "max_position")}
    sizes |= {f"KV heads of {group.name}": group.kv_heads for group in config.kv_groups if group.layers}
    for name, value in sizes.items():
        if value < 1:
            raise ConfigError(f"the model's config.json gives {value} for {name}; it has to be at least 1")
    if wrong := [token for token in config.eos_ids if not isinstance(token, int)]:
        raise ConfigError(f"eos_token_id in the model's config.json is {wrong[0]!r} and has to be a token id")


_INSIDE = ("*/config.json", "snapshots/*/config.json")
"""Globs that find models in a directory of several models, and in a download cache."""


def _what_is_wrong(path: Path, registry: Registry) -> str:
    loaders = ", ".join(spec.name for spec, _ in registry.specs(WeightLoaderSpec)) or "none"
    if path.is_file():
        return f"{path} is a file that no weight loader recognises (loaders: {loaders}); give a model's directory"
    torch_files = [*path.glob("*.bin"), *path.glob("*.pt"), *path.glob("*.pth")]
    if torch_files:
        return (
            f"{path} holds weights as {torch_files[0].name} only, a pickle, which can run any code and is never "
            f"loaded; convert it: AutoModelForCausalLM.from_pretrained(...).save_pretrained(...) in transformers"
        )
    if not (path / "config.json").is_file():
        inside = next((file.parent for way in _INSIDE for file in sorted(path.glob(way))), None)
        hint = f"; there is one in {inside}" if inside else ""
        return (
            f"{path} holds no model: it has no config.json, and no weight loader recognises it (loaders: {loaders})"
            f"{hint}; give --model_dir the directory of a model, or a .gguf file"
        )
    return f"{path} has a config.json but no weights; download its *.safetensors, or use --load_format dummy"
