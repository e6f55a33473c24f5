"""Rotary positions: the settings of a config, and the angles of a step's tokens, computed once for all layers.

The formulas are those of transformers:

- linear: position interpolation, arXiv:2306.15595.
- dynamic: NTK-aware; the base grows with the length.
- yarn: arXiv:2309.00071.
- llama3: Llama 3.1's smoothed interpolation.
- longrope: a factor for every pair, arXiv:2402.13753.

One thing differs: longrope's factors are chosen once, by the longest request to expect. Cached keys would not fit
another choice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from llmcore.api.errors import ConfigError
from llmcore.layers.build import Build
from llmcore.layers.layer import Layer
from llmcore.layers.step import Step
from llmcore.ops.rope_angles import turns


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """The rotary positions that a config describes.

    `kind`: the rope type, a key of `KINDS`. `theta`: the base. `rotated`: elements of a head that rope rotates.
    `original`: the length in tokens for which the model was trained. `scaling`: the config's own fields for the kind.
    """

    kind: str = "default"
    theta: float = 10000.0
    rotated: int
    original: int
    scaling: Mapping[str, Any] = field(default_factory=dict)

    @property
    def max_position(self) -> int:
        """The length in tokens that a linear, dynamic or yarn scaling covers; the original length for other kinds."""
        stretched = self.kind in ("linear", "dynamic", "yarn")
        return int(self.original * float(self.scaling["factor"])) if stretched else self.original

    @property
    def fixed_angles_up_to(self) -> int | None:
        """For ModelConfig: the longest prompt whose angles do not depend on its length; None if they never do."""
        return self.original if self.kind == "dynamic" else None


def read_rope(hf: Mapping[str, Any], head_size: int, *, partial_rotary: bool = True) -> RopeConfig:
    """Read `rope_parameters`, or `rope_theta` and `rope_scaling`, of a Hugging Face config.

    `partial_rotary`: True if the family's code in transformers reads `partial_rotary_factor`; otherwise rope rotates
    whole heads. Raises ConfigError for an unknown kind, for a kind that lacks a number, and for an invalid factor.
    """
    scaling = dict(hf.get("rope_scaling") or hf.get("rope_parameters") or {})
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind not in KINDS:
        raise ConfigError(f"rope type {kind!r} is not known; known: {', '.join(KINDS)}")
    trained = int(hf.get("max_position_embeddings") or 2048)
    original = int(
        hf.get("original_max_position_embeddings") or scaling.get("original_max_position_embeddings") or trained
    )
    if kind in ("yarn", "longrope") and not scaling.get("factor"):
        scaling["factor"] = trained / original
    missing = [name for name in KINDS[kind].needs if scaling.get(name) is None]
    if missing:
        raise ConfigError(f"rope type {kind!r} needs {', '.join(missing)} in rope_parameters (or rope_scaling)")
    if "factor" in KINDS[kind].needs and float(scaling["factor"]) <= 0:
        raise ConfigError(
            f"rope type {kind!r} with factor {scaling['factor']} is no scaling; check the model's config"
        )
    if kind in ("yarn", "llama3", "longrope"):
        trained = original
    given = (scaling.get("partial_rotary_factor"), hf.get("partial_rotary_factor"))
    share = next((float(value) for value in given if value is not None), 1.0)
    rotated = int(head_size * _share_that_turns(share, kind, partial_rotary))
    theta = float(scaling.get("rope_theta") or hf.get("rope_theta") or 10000.0)
    return RopeConfig(kind=kind, theta=theta, rotated=rotated, original=trained, scaling=scaling)


def _share_that_turns(factor: float, kind: str, partial_rotary: bool) -> float:
    """The part of a head, up to 1, that rope rotates if the config's partial_rotary_factor is `factor`.

    A family that does not read the factor rotates whole heads with the default kind. For every other kind transformers
    computes angles for a part of the head, which such a family cannot apply. Raises ConfigError then.
    """
    if not partial_rotary:
        if kind != "default" and factor != 1:
            raise ConfigError(
                f"partial_rotary_factor is {factor:g} and the rope type is {kind!r}: this family turns whole heads "
                "and cannot run that, nor can transformers; remove partial_rotary_factor from the model's config"
            )
        return 1.0
    if not 0 < factor <= 1:
        raise ConfigError(f"partial_rotary_factor is {factor:g} in the model's config; it has to be in (0, 1]")
    return factor


class Rope(Layer):
    """cos and sin of each token's angles, in the form that op `rope` takes.

    Raises ConfigError if angles depend on the prompt's length and the ModelConfig does not say so: a prompt of another
    length would get wrong keys from the prefix cache. Also raises ConfigError for an odd number of rotated elements.
    """

    def __init__(self, build: Build, config: RopeConfig) -> None:
        super().__init__()
        fixed, said = config.fixed_angles_up_to, build.config.fixed_angles_up_to
        if fixed is not None and (said is None or said > fixed):
            raise ConfigError(
                f"the angles of rope {config.kind!r} depend on a prompt's length beyond {fixed} tokens; the family's "
                "read_config must say so: ModelConfig(fixed_angles_up_to=rope.fixed_angles_up_to)"
            )
        if config.rotated % 2:
            raise ConfigError(f"rope turns pairs of elements, not {config.rotated}; check the model's config")
        self.rotated = config.rotated
        self._angles = self._make(build, config)

    def _make(self, build: Build, config: RopeConfig) -> Angles:
        return KINDS[config.kind].make(config, build)

    def angles(self, step: Step) -> tuple[torch.Tensor, torch.Tensor]:
        """(cos, sin) [T, rotated] f32. The first layer that asks in a step computes them."""
        notes = step.notes
        if (self, "cos") not in notes:
            notes[self, "cos"], notes[self, "sin"] = self._angles(step)
        return notes[self, "cos"], notes[self, "sin"]


class NoRope(Rope):
    """Angles of zero for layers without positions, so that such layers can use the same ops and stay unrotated."""

    def _make(self, build: Build, config: RopeConfig) -> Angles:
        return _always(config, build, torch.zeros(config.rotated // 2), 1.0)


# --- kinds -----------------------------------------------------------------------------------------------------

Angles = Callable[[Step], tuple[torch.Tensor, torch.Tensor]]
"""A function from a step to (cos, sin) [T, rotated] f32, in the form that op `rope` takes."""


def inverse_frequencies(config: RopeConfig) -> torch.Tensor:
    """theta^(-2i / rotated), [rotated / 2] f32."""
    exponents = torch.arange(0, config.rotated, 2, dtype=torch.float32) / config.rotated
    return 1.0 / config.theta**exponents


def scaled(config: RopeConfig) -> tuple[torch.Tensor, float]:
    """(inverse frequencies [rotated / 2] f32, amplitude) of a kind whose angles depend only on the position."""
    return _FIXED[config.kind](config)


def _linear(config: RopeConfig) -> tuple[torch.Tensor, float]:
    return inverse_frequencies(config) / float(config.scaling["factor"]), 1.0


def _llama3(config: RopeConfig) -> tuple[torch.Tensor, float]:
    plain = inverse_frequencies(config)
    factor, low, high = (float(config.scaling[name]) for name in ("factor", "low_freq_factor", "high_freq_factor"))
    turns = config.original * plain / (2 * math.pi)
    # By a pair's turns within the original length: below `low` it is stretched, above `high` kept, blended between.
    smooth = ((turns - low) / (high - low)).clamp(0, 1)
    return plain * (smooth + (1 - smooth) / factor), 1.0


def _yarn(config: RopeConfig) -> tuple[torch.Tensor, float]:
    scaling, factor = config.scaling, float(config.scaling["factor"])
    plain = inverse_frequencies(config)

    def dimension(turns: float) -> float:
        """The index of the pair that makes `turns` turns over the original length."""
        return config.rotated * math.log(config.original / (turns * 2 * math.pi)) / (2 * math.log(config.theta))

    first, last = dimension(float(scaling.get("beta_fast") or 32)), dimension(float(scaling.get("beta_slow") or 1))
    if scaling.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, config.rotated - 1)
    width = last - first or 0.001
    stretched = ((torch.arange(config.rotated // 2, dtype=torch.float32) - first) / width).clamp(0, 1)
    return plain / factor * stretched + plain * (1 - stretched), _yarn_amplitude(scaling, factor)


def _yarn_amplitude(scaling: Mapping[str, Any], factor: float) -> float:
    def grown(by: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * by * math.log(factor) + 1.0

    if scaling.get("attention_factor") is not None:
        return float(scaling["attention_factor"])
    above, below = scaling.get("mscale"), scaling.get("mscale_all_dim")
    return grown(float(above)) / grown(float(below)) if above and below else grown(1.0)


_FIXED: Mapping[str, Callable[[RopeConfig], tuple[torch.Tensor, float]]] = {
    "default": lambda config: (inverse_frequencies(config), 1.0),
    "linear": _linear,
    "yarn": _yarn,
    "llama3": _llama3,
}


def _fixed(config: RopeConfig, build: Build) -> Angles:
    return _always(config, build, *scaled(config))


def _longrope(config: RopeConfig, build: Build) -> Angles:
    longest = build.longest_request or build.config.max_position
    if longest > config.original:
        build.notes["rope"] = (
            f"long factors, as requests may have more than the {config.original} tokens that the short ones are for; "
            f"--max_req_total_len {config.original} takes the short ones"
        )
    else:
        build.notes["rope"] = (
            f"short factors, as no request has more than the {config.original} tokens that they are for; "
            "a larger --max_req_total_len takes the long ones"
        )
    return _always(config, build, *by_length(config, longest))


def by_length(config: RopeConfig, longest: int) -> tuple[torch.Tensor, float]:
    """(inverse frequencies [rotated / 2] f32, amplitude) of longrope for requests of up to `longest` tokens.

    Raises ConfigError unless there is one factor for each pair.
    """
    name = "long" if longest > config.original else "short"
    factors = torch.tensor(config.scaling[f"{name}_factor"], dtype=torch.float32)
    if factors.shape != (config.rotated // 2,) or not bool((factors > 0).all()):
        raise ConfigError(
            f"rope type 'longrope' needs {config.rotated // 2} numbers above 0 as {name}_factor, one for each pair of "
            "elements that turn; check the model's config"
        )
    scaling, factor = config.scaling, float(config.scaling["factor"])
    amplitude = scaling.get(f"{name}_mscale") or scaling.get("attention_factor")
    if amplitude is None:
        amplitude = math.sqrt(1 + math.log(factor) / math.log(config.original)) if factor > 1 else 1.0
    return inverse_frequencies(config) / factors, float(amplitude)


def _always(config: RopeConfig, build: Build, frequencies: torch.Tensor, amplitude: float) -> Angles:
    """Angles that depend only on the position."""
    frequencies = frequencies.to(build.torch_device)
    ops = build.op("rope_angles", rotated=config.rotated)

    def angles(step: Step) -> tuple[torch.Tensor, torch.Tensor]:
        both: tuple[torch.Tensor, torch.Tensor] = ops[step.bucket](step.positions[0], frequencies, amplitude)
        return both

    return angles


def _dynamic(config: RopeConfig, build: Build) -> Angles:
    factor, original = float(config.scaling["factor"]), config.original
    exponents = (torch.arange(0, config.rotated, 2, dtype=torch.float32) / config.rotated).to(build.torch_device)
    power = config.rotated / (config.rotated - 2)

    def angles(step: Step) -> tuple[torch.Tensor, torch.Tensor]:
        positions = step.positions[0]
        # A prompt token's angles depend on the prompt's length, a generated token's on the length up to that token
        # (design, section 6).
        length = torch.maximum(positions + 1, step.prompt_len).clamp(min=original).float()
        theta = config.theta * (factor * length / original - (factor - 1)) ** power
        return turns(positions.float().unsqueeze(1) / theta.unsqueeze(1) ** exponents, 1.0)

    return angles


@dataclass(frozen=True)
class _Kind:
    make: Callable[[RopeConfig, Build], Angles]
    needs: tuple[str, ...] = ()


KINDS: Mapping[str, _Kind] = {
    "default": _Kind(_fixed),
    "linear": _Kind(_fixed, ("factor",)),
    "dynamic": _Kind(_dynamic, ("factor",)),
    "yarn": _Kind(_fixed, ("factor",)),
    "llama3": _Kind(_fixed, ("factor", "low_freq_factor", "high_freq_factor")),
    "longrope": _Kind(_longrope, ("factor", "short_factor", "long_factor")),
}
"""Rope types by their names in configs."""
