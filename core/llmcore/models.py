"""What core knows of a model: its config, the groups of its KV, and the attention and routes that its layers want."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from llmcore.specs import DType


@dataclass(frozen=True, kw_only=True)
class KVGroupSpec:
    """Layers that store KV alike. Head counts are per model, not per rank.

    `reach`: "all"; "window:N", "state" (fixed bytes per sequence) and "prompt" (cross attention) are for later, and
    this version keeps everything whatever it says. What a query sees is AttnSpec.window.
    """

    name: str
    layers: tuple[int, ...]
    kv_heads: int
    key_size: int
    value_size: int
    layout: str = "token"
    reach: str = "all"


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """What core needs to know of any model; a family subclasses it with what its own blocks read.

    `max_position` is in tokens. `fixed_angles_up_to`: the longest prompt whose rotary angles do not depend on the
    request's length (None: they never do); longer prompts enter the prefix cache under a salt of their own. `scores`:
    numbers that the head gives of a prompt's last token, in place of logits; 0: a language model. `expert_elements`:
    size of all intermediate results of one token in its experts (see llmcore.layers), for predictions of memory.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    max_position: int
    dtype: DType
    eos_ids: tuple[int, ...] = ()
    kv_groups: tuple[KVGroupSpec, ...]
    fixed_angles_up_to: int | None = None
    scores: int = 0
    expert_elements: int = 0


@dataclass(frozen=True, kw_only=True)
class AttnSpec:
    """The attention a layer wants, frozen when its kernel is made; sizes are in elements.

    Head counts are the model's where a family states them, and one rank's where a kernel reads them.

    `window`: tokens a query sees including itself (None: all). `soft_cap`: cap * tanh(score / cap). `mask`:
    "causal", "full", "spans" or "tree".
    """

    heads: int
    kv_heads: int
    key_size: int
    value_size: int
    scale: float
    window: int | None = None
    soft_cap: float | None = None
    sinks: bool = False
    mask: str = "causal"


@dataclass(frozen=True, kw_only=True)
class RouteSpec:
    """How a mixture of experts chooses, frozen when its kernel is made.

    Of `experts` each token gets the `top_k` of the best scores ("softmax" over all experts, or "sigmoid"; plus a
    correction where the router has one, which only the choice sees). With `groups` > 1 neighbouring experts form
    groups, and only the `top_groups` best are looked at, by their best expert ("max") or the sum of their two best
    ("top2"). Weights are the scores, divided by their sum if `normalize`, times `scale`.
    """

    experts: int
    top_k: int
    scoring: str = "softmax"
    normalize: bool = False
    scale: float = 1.0
    groups: int = 1
    top_groups: int = 1
    group_score: str = "max"


@dataclass(frozen=True)
class LayerInfo:
    """Which layer `build_layer` is asked about."""

    name: str
    index: int
    config: ModelConfig


@dataclass(frozen=True)
class ModelReport:
    """What was built: the chosen kernel per (op, shape) and bucket, and what memory went where (bytes)."""

    config: ModelConfig
    kernels: Mapping[str, str]
    weight_bytes: int
    kv_tokens: int
    fingerprint: str
