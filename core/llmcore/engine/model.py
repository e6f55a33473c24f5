"""From a model directory to a model on a device, with its kernels bound and its weights loaded."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import msgspec
from torch import Tensor

from llmcore.api.errors import ConfigError
from llmcore.api.models import ModelConfig
from llmcore.api.protocols import Checkpoint, Device
from llmcore.api.specs import DeviceSpec
from llmcore.config import Config
from llmcore.engine.blueprint import blueprint
from llmcore.layers.build import AttentionKernels, Build
from llmcore.layers.mesh import Mesh
from llmcore.layers.step import Step
from llmcore.registry.devices import best_device
from llmcore.registry.loader import load
from llmcore.registry.modes import chosen_modes
from llmcore.registry.registry import Registry
from llmcore.weights.load import Weighed, dummy_weights, load_weights
from llmcore.weights.map import WeightMap
from llmcore.weights.source import open_checkpoint

FILTERS = ("top_p", "top_k", "min_p", "typical_p")
SAMPLING = ("temperature", *FILTERS, "repetition_penalty")
"""The entries of a generation_config.json that say how tokens are drawn."""


def sampling_defaults(choice: str, own: Mapping[str, Any]) -> dict[str, Any]:
    """The generation config that `--generation_config` means; `own`: the model's. Raises ConfigError.

    With "none", what says how tokens are drawn is left out; what ends an answer stays. If `do_sample` is
    false, the temperature is 0 and filters are ignored, as in transformers.
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


def describe_sampling(choice: str, generation: Mapping[str, Any]) -> str:
    """The line of the start-up summary that says where the sampling defaults come from."""
    said = [f"{name} {generation[name]:g}" for name in SAMPLING if isinstance(generation.get(name), (int, float))]
    if choice == "none":
        return "as each API says (--generation_config none)"
    source = "the model's generation_config.json" if choice == "auto" else choice
    if not said:
        return f"as each API says; {source} sets nothing"
    return f"{', '.join(said)} ({source}); the rest as each API says"


logger = logging.getLogger(__name__)

Progress = Callable[[str, int, int], None]
"""(stage, done, total): how far a start-up has come; "weights" counts bytes."""


class Model(Protocol):
    """A family's model as the engine sees it (`layers.Decoder` is one).

    `attention_kernels`: by KV group, the kernels that plan on the host before a step; none for a group that needs
    no plan.
    """

    config: ModelConfig
    attention_kernels: Mapping[str, AttentionKernels]

    def __call__(self, step: Step) -> tuple[Tensor, Tensor | None]:
        """(hidden, residual) of the step's sampled tokens, [S, hidden size] each; of all where `sampled` is None."""

    def logits(self, hidden: Tensor, residual: Tensor | None = None) -> Tensor:
        """[S, vocabulary] of any float type, of S tokens' hidden states."""

    def own_logits(self, hidden: Tensor, residual: Tensor | None = None) -> Tensor:
        """The part of `logits` that `layers.held_tokens` gives this rank. A model on one rank needs no such
        method."""

    def normed(self, hidden: Tensor, residual: Tensor | None = None) -> Tensor:
        """[S, hidden size], what `logits` are computed from. Without this the server has no embeddings."""


@dataclass(frozen=True)
class Loaded:
    """A model that is ready to run."""

    model: Any
    config: ModelConfig
    build: Build
    weights: Weighed
    generation: dict[str, Any]
    """The generation config that the settings chose."""
    quant: str | None = None
    """The quantization method of its weights, None if they are plain."""


def pick_device(registry: Registry, name: str, index: int = 0) -> Device:
    """The device number `index` of the kind `name`, or for `auto` of the available kind of the highest priority.

    Raises ConfigError.
    """
    if name != "auto":
        spec = registry.find(DeviceSpec, name)
        reason = load(spec.available)()
        if reason is not None:
            raise ConfigError(f"--device {name}: {reason}")
    else:
        spec = best_device(registry)
    device: Device = load(spec.make)(index)
    return device


def load_model(
    config: Config, registry: Registry, device: Device, progress: Progress, mesh: Mesh | None = None
) -> Loaded:
    """Read, build, fill: the whole model, or one rank's share of it. Raises ConfigError that says what to do."""
    dummy = config.model.load_format == "dummy"
    checkpoint = open_checkpoint(registry, config.model.path, weights=not dummy)
    plain = blueprint(config, registry, device.info, checkpoint, mesh)
    generation = sampling_defaults(config.model.generation_config, checkpoint.generation_config())
    model_config = replace(plain.model, eos_ids=_eos_ids(config, plain.model, generation))
    plan = replace(plain, model=model_config).pinned(chosen_modes(config, registry), config.kernels.kernel)
    model, build, names, filling, quant = plan.build(device.torch_device)
    build.calibrate(checkpoint, config.plugin_options)
    weights = dummy_weights(model) if dummy else _fill(model, filling, names, progress, plan.mesh)
    return Loaded(model, model_config, build, weights, generation, quant)


def _fill(model: Any, checkpoint: Checkpoint, names: WeightMap, progress: Progress, mesh: Mesh) -> Weighed:
    total = sum(parameter.nbytes for parameter in model.parameters())
    done = 0

    def count(size: int) -> None:
        nonlocal done
        done += size
        progress("weights", min(done, total), total)

    weights = load_weights(model, checkpoint, names, mesh=mesh, progress=count)
    progress("weights", total, total)
    return weights


def _eos_ids(config: Config, model: ModelConfig, generation: dict[str, Any]) -> tuple[int, ...]:
    """The ids that the operator gives; else those of config.json and of the generation config.

    Raises ConfigError for an id of the operator's outside the vocabulary; the model's own such ids are left out.
    """
    for token in config.model.eos_id:
        if token >= model.vocab_size:
            raise ConfigError(
                f"--eos_id {token} is not in the vocabulary; the model's ids end at {model.vocab_size - 1}"
            )
    if config.model.eos_id:
        return tuple(config.model.eos_id)
    named = generation.get("eos_token_id")
    more = named if isinstance(named, list) else [] if named is None else [named]
    if wrong := [token for token in more if not isinstance(token, int)]:
        raise ConfigError(f"eos_token_id in generation_config.json is {wrong[0]!r} and has to be a token id")
    return tuple(token for token in dict.fromkeys((*model.eos_ids, *more)) if token < model.vocab_size)
