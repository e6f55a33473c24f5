"""The tree of settings. A field is an option, a YAML key, an environment variable and a row of docs/options.md.

Names are LightLLM's. If LMDeploy has another name for the same meaning, it is an alias. `None` means that the default
depends on the model or the device, as the help says.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from llmcore.api.models import DATA_TYPES
from llmcore.api.specs import PluginInfo

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

S = TypeVar("S", bound="DataclassInstance")

START_SECONDS = 600.0
"""The most seconds that a rank waits for another one before the engine is ready: one may compile kernels in a step for
which others wait already."""


def option(default: Any, help: str, **more: Any) -> Any:
    """A setting: its default, one line of help, and further fields of `specs.OptionSpec`.

    These are `aliases`, `choices`, `unit`, `low`, `high`, `unset`, `one_word`, `secret`, `login`, `variables` and
    `first_page`. A setting with a unit is a count and may be written 32k (32,000) or 32K (32,768).
    """
    return field(default=default, metadata={"summary": help, **more})


@dataclass(frozen=True, kw_only=True)
class Model:
    """The model and how it is loaded."""

    model_dir: str | None = option(
        None, "Directory of the model, a GGUF file, or a name that a plugin fetches, as org/name.", first_page=True
    )
    model_name: tuple[str, ...] = option(
        (),
        "Name that clients see (default: the name of a fetched model, else the directory's); further names, after a "
        "comma, are aliases.",
        one_word=True,
        first_page=True,
    )
    tp: int = option(
        1,
        "Processes that compute the model, each on its own device (default: dp). Those of one engine, all without dp, "
        "share every layer, each with a part of the weights and KV.",
        unit="processes",
        low=1,
    )
    dp: int = option(
        1,
        "Engines of the server, each with the whole model on tp / dp processes; a request goes to one of them. Models "
        "with latent attention (MLA) get such replicas too.",
        unit="engines",
        low=1,
    )
    rank_timeout: float = option(
        20.0,
        "Seconds that one of several processes of a ready engine waits in a step for another one, until it fails and "
        "the engine ends; at the start, while kernels are compiled, it waits up to ten minutes.",
        low=1,
        high=START_SECONDS,
    )
    tokenizer_mode: str = option("fast", "Which tokenizer to use.", choices=("fast", "slow", "auto"))
    tool_call_parser: str | None = option(
        None, "Parser of the model's tool calls: a name, none, or auto, by the chat template (default: auto)."
    )
    reasoning_parser: str | None = option(
        None, "Parser of the model's reasoning before its answer: a name, none, or auto (default: auto)."
    )
    load_way: str = option("HF", "Layout of the checkpoint.", choices=("HF", "DS"))
    load_format: str = option(
        "auto", "auto reads the weights; dummy draws random ones from the config alone.", choices=("auto", "dummy")
    )
    data_type: str | None = option(
        None,
        "Type of weights and KV (default: the checkpoint's).",
        aliases=("dtype",),
        choices=tuple(DATA_TYPES),
        unset="auto",
        first_page=True,
    )
    rope_scaling_factor: float = option(
        0.0,
        "Above 0: stretch rotary positions by this factor as prompts grow (dynamic NTK), up to max_req_total_len.",
        low=0,
    )
    chat_template: str | None = option(
        None,
        "Chat template: a Jinja file; LMDeploy's JSON, as a file or as text; or a tool parser's name, for its generic "
        "template with tools.",
    )
    generation_config: str = option(
        "auto", "Sampling defaults: auto (the model's), none (each API's own), or a generation_config.json."
    )
    trust_remote_code: bool = option(False, "Allow code from the model directory when its tokenizer is converted.")
    eos_id: tuple[int, ...] = option(
        (),
        "Token ids that end an answer (default: those of the model's config.json and generation_config.json).",
        low=0,
    )
    device: str = option("auto", "Device to run on: auto, or a name that `llmcore env` lists.", first_page=True)

    @property
    def ranks(self) -> int:
        """The processes of each engine."""
        return self.tp // self.dp

    @property
    def path(self) -> Path:
        """The model's directory or file, once `with_model_resolved` has found it."""
        return Path(self.model_dir or "")


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Memory and lengths."""

    max_total_token_num: int | None = option(
        None, "Size of the KV cache, in tokens (default: as many as fit).", unit="tokens", low=1, first_page=True
    )
    mem_fraction: float = option(
        0.9, "Share of the accelerator's memory to use, above 0.", low=0, high=1, first_page=True
    )
    cache_max_entry_count: float | None = option(
        None,
        "Share for the KV cache, above 0, of the memory that the weights leave free; instead of mem_fraction.",
        low=0,
        high=1,
    )
    cache_block_seq_len: int | None = option(
        None,
        "Tokens of a KV cache block, called granule (default: the smallest that the kernels support).",
        unit="tokens",
        low=1,
    )
    running_max_req_size: int = option(
        1000, "Most requests that run at once.", aliases=("max_batch_size",), unit="requests", low=1
    )
    max_req_input_len: int | None = option(
        None, "Longest prompt, in tokens (default: max_req_total_len - 1).", unit="tokens", low=1
    )
    max_req_total_len: int | None = option(
        None,
        "Longest prompt plus answer, in tokens (default: the model's maximum, at most 16384).",
        aliases=("session_len",),
        unit="tokens",
        low=2,
        first_page=True,
    )


@dataclass(frozen=True, kw_only=True)
class Scheduling:
    """Scheduling."""

    batch_max_tokens: int | None = option(
        None,
        "Tokens of one step (default: 8192 on a GPU, 2048 on a CPU).",
        aliases=("num_tokens_per_iter",),
        unit="tokens",
        low=1,
        unset="0",
    )
    chunked_prefill_size: int | None = option(
        None,
        "Most prompt tokens of one request in a step (default: batch_max_tokens).",
        aliases=("max_prefill_token_num", "splitfuse_block_size"),
        unit="tokens",
        low=1,
    )
    prefill_stall_ms: float | None = option(
        None,
        "Milliseconds by which prompts may lengthen a step while answers wait for their next token; more when over 6 "
        "prompts wait (default: 16 on a GPU, 0 on a CPU; 0: up to batch_max_tokens).",
        low=0,
    )
    disable_chunked_prefill: bool = option(False, "Compute every prompt in one step.")
    disable_dynamic_prompt_cache: bool = option(
        False, "Turn the prefix cache off: do not keep and reuse the KV of common prefixes."
    )
    scheduler: str = option("fcfs", "Scheduling policy: fcfs, priority, or a plugin's.")
    kv_manager: str = option("radix", "Prefix-cache policy: radix, none, or a plugin's.")
    length_estimator: str | None = option(
        None, "Estimator of answers' lengths: past_future (default), capped, conservative."
    )
    router_token_ratio: float | None = option(
        None,
        "Below this share of slots in use, expect capped lengths; above it, and with 0, the full max_new_tokens.",
        low=0,
        high=1,
    )
    router_max_new_token_len: int = option(1024, "Cap of an expected length, in tokens.", unit="tokens", low=1)
    router_max_wait_tokens: int = option(0, "New requests join every n-th step (0: any step).", low=0)

    @property
    def estimator(self) -> str:
        """The name of the length estimator. A ratio of 0 means `conservative`, a ratio above 0 `capped`."""
        if self.router_token_ratio is None:
            return self.length_estimator or "past_future"
        return "capped" if self.router_token_ratio > 0 else "conservative"


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """Kernels and modes."""

    mode: tuple[str, ...] = option((), "Names of modes; a mode is a bundle of layout, kernels and quantization.")
    kernel: tuple[str, ...] = option((), "Kernels to use, as op=kernel.")
    deterministic: bool = option(
        False, "Make a request's greedy answer the same, to the bit, alone and in any batch; slower."
    )
    disable_cudagraph: bool = option(
        False, "Launch every kernel of a step by itself instead of replaying captured steps.", aliases=("eager_mode",)
    )
    graph_max_batch_size: int = option(
        256,
        "Most requests of a decode step that is captured; larger steps are launched kernel by kernel.",
        unit="requests",
        low=1,
    )


@dataclass(frozen=True, kw_only=True)
class Plugins:
    """Plugins."""

    plugins: tuple[str, ...] | None = option(
        None,
        "Plugins to load, in order of preference; -name leaves one out, distribution:name replaces another plugin of "
        "that name (default: all installed).",
        first_page=True,
    )


@dataclass(frozen=True, kw_only=True)
class Config:
    """All settings, and the plugins that were found at the start.

    `plugin_options`: the values of plugins' options, by name. `revision`: of a model that was fetched by its name.
    """

    model: Model = Model()
    memory: Memory = Memory()
    scheduling: Scheduling = Scheduling()
    kernels: Kernels = Kernels()
    plugins: Plugins = Plugins()
    plugin_options: Mapping[str, Any] = field(default_factory=dict)
    discovered: tuple[PluginInfo, ...] = ()
    revision: str = ""

    def __post_init__(self) -> None:
        # A config that came from another process has lists where tuples were.
        brought = {k: tuple(v) if isinstance(v, list) else v for k, v in self.plugin_options.items()}
        object.__setattr__(self, "plugin_options", brought)
        object.__setattr__(self, "_sections", {})

    def section(self, kind: type[S]) -> S:
        """The settings that a plugin declared as the frozen dataclass `kind` (see `options_of`)."""
        sections: dict[type, Any] = self._sections  # type: ignore[attr-defined]  # not a field: it does not travel
        if kind not in sections:
            given = {f.name: self.plugin_options[f.name] for f in fields(kind) if f.name in self.plugin_options}
            sections[kind] = kind(**given)
        return cast(S, sections[kind])
