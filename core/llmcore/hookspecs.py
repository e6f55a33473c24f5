"""Every hook, typed. A hook's docstring is its contract: when it is called, what it returns, who chooses.

`register_*` hooks contribute frozen specs at start-up and may be generators; what gets used is decided elsewhere, by
`llmcore.resolve` or by name, never by the order of registration. `build_*` runs while a model is built, `on_*`
observes. No hook runs inside a step.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import pluggy

if TYPE_CHECKING:
    import torch

    from llmcore.config import Config
    from llmcore.models import LayerInfo, ModelReport
    from llmcore.processors import LogitsProcessorSpec
    from llmcore.protocols import RequestRecord
    from llmcore.specs import (
        CommandSpec,
        DeviceSpec,
        DialectSpec,
        KernelSpec,
        KVLayoutSpec,
        KVManagerSpec,
        LengthEstimatorSpec,
        MetricSinkSpec,
        ModelSpec,
        ModeSpec,
        OpSpec,
        OptionSpec,
        OutputParserSpec,
        QuantMethodSpec,
        SchedulerSpec,
        TokenizerSpec,
        WeightLoaderSpec,
    )

hookspec = pluggy.HookspecMarker("llmcore")
hookimpl = pluggy.HookimplMarker("llmcore")


@hookspec
def register_models() -> Iterable[ModelSpec]:  # type: ignore[empty-body]
    """Model families.

    Called: once per process at start-up.
    Returns: ModelSpecs; their import strings are loaded only for the model that is served.
    Chosen by: the first name in the checkpoint's `architectures`; two claims are an error unless `--plugins`
    leaves one.
    """


@hookspec
def register_ops() -> Iterable[OpSpec]:  # type: ignore[empty-body]
    """Ops: what can be computed, each with a torch reference.

    Called: once per process at start-up.
    Returns: OpSpecs with names nobody else uses.
    Chosen by: the layers that ask for an op by name.
    """


@hookspec
def register_kernels() -> Iterable[KernelSpec]:  # type: ignore[empty-body]
    """Kernels: implementations of ops.

    Called: once per process at start-up; a kernel's `make` at build, once per op, shape and token bucket.
    Returns: KernelSpecs.
    Chosen by: `resolve`: a `--kernel op=name` pin, what fits, priority, measured cost, the narrower requirement,
    the order of `--plugins`; what is still equal then is an error.
    """


@hookspec
def register_modes() -> Iterable[ModeSpec]:  # type: ignore[empty-body]
    """Modes: names for `--mode`, each a bundle of pins.

    Called: once per process at start-up.
    Returns: ModeSpecs.
    Chosen by: `--mode`; one that does not fit the model or the device is a start-up error that lists those that do.
    """


@hookspec
def register_devices() -> Iterable[DeviceSpec]:  # type: ignore[empty-body]
    """Kinds of device.

    Called: once per process at start-up.
    Returns: DeviceSpecs.
    Chosen by: `--device`; `auto` takes the available one of the highest priority.
    """


@hookspec
def register_schedulers() -> Iterable[SchedulerSpec]:  # type: ignore[empty-body]
    """Scheduling policies: which requests run, and how much of each, in a step.

    Called: once per process at start-up; `make` once per engine.
    Returns: SchedulerSpecs.
    Chosen by: `--scheduler`. Core validates every plan, so a policy cannot leak or corrupt memory.
    """


@hookspec
def register_length_estimators() -> Iterable[LengthEstimatorSpec]:  # type: ignore[empty-body]
    """Estimators of how much a request will still produce, for admission.

    Called: once per process at start-up; `make` once per engine.
    Returns: LengthEstimatorSpecs.
    Chosen by: `--length_estimator`.
    """


@hookspec
def register_kv_layouts() -> Iterable[KVLayoutSpec]:  # type: ignore[empty-body]
    """KV layouts: how a group of layers stores keys and values.

    Called: once per process at start-up; `make` once per KV group.
    Returns: KVLayoutSpecs.
    Chosen by: the model's KV group, or a mode that pins another.
    """


@hookspec
def register_kv_managers() -> Iterable[KVManagerSpec]:  # type: ignore[empty-body]
    """Prefix-cache policies: what to keep of finished work, and what to drop first.

    Called: once per process at start-up; `make` once per KV group.
    Returns: KVManagerSpecs.
    Chosen by: `--kv_manager`; `--disable_dynamic_prompt_cache` selects `none`.
    """


@hookspec
def register_weight_loaders() -> Iterable[WeightLoaderSpec]:  # type: ignore[empty-body]
    """Checkpoint formats.

    Called: once per process at start-up; `open` when a model is loaded.
    Returns: WeightLoaderSpecs.
    Chosen by: the one whose `sniff` recognises `--model_dir`; two are an error that lists them.
    """


@hookspec
def register_quant_methods() -> Iterable[QuantMethodSpec]:  # type: ignore[empty-body]
    """Weight quantization: what a checkpoint's quantized tensors become, and how linears hold and multiply them.

    Called: once per process at start-up; `reads` and `make` when a model is loaded.
    Returns: QuantMethodSpecs.
    Chosen by: a mode that pins one; else the one that reads the `quantization_config` of config.json. None, or two,
    end the start with an error that lists them.
    """


@hookspec
def register_tokenizers() -> Iterable[TokenizerSpec]:  # type: ignore[empty-body]
    """Sources of tokenizers.

    Called: once per process at start-up.
    Returns: TokenizerSpecs.
    Chosen by: `--tokenizer_mode` and `sniff`; of several the highest priority.
    """


@hookspec
def register_output_parsers() -> Iterable[OutputParserSpec]:  # type: ignore[empty-body]
    """Parsers of models' output: tool calls and reasoning, in the notations that models were trained on.

    Called: once per process at start-up; `make` once per choice of a chat request, in the HTTP worker.
    Returns: OutputParserSpecs.
    Chosen by: `--tool_call_parser` and `--reasoning_parser`, else by the model's chat template (`recognises`); a name
    that nobody brings is a start-up error that lists those there are.
    """


@hookspec
def register_dialects() -> Iterable[DialectSpec]:  # type: ignore[empty-body]
    """HTTP API shapes.

    Called: once per process at start-up; `make` once per HTTP worker.
    Returns: DialectSpecs.
    Chosen by: all that `--plugins` admits are served; two routes with one path are an error.
    """


@hookspec
def register_logits_processors() -> Iterable[LogitsProcessorSpec]:  # type: ignore[empty-body]
    """Logits processors: how a request changes its own scores before a token is drawn.

    Called: once per process at start-up; `make` once per request that asks for it, in the engine.
    Returns: LogitsProcessorSpecs with names nobody else uses.
    Chosen by: the request's `logits_processors`, by name; an unknown one is refused with a list of those there are.
    """


@hookspec
def register_commands() -> Iterable[CommandSpec]:  # type: ignore[empty-body]
    """Subcommands of `llmcore`.

    Called: once per process at start-up; the command is imported when it is run.
    Returns: CommandSpecs with names that neither core nor another plugin uses.
    Chosen by: the command line.
    """


@hookspec
def register_options() -> Iterable[OptionSpec]:  # type: ignore[empty-body]
    """Options of `llmcore serve` that a plugin brings.

    Called: once per process at start-up, before options are parsed.
    Returns: OptionSpecs with names nobody else uses. `options_of` makes them from the fields of a frozen dataclass.
    Chosen by: the operator. `on_startup`, a dialect's `front` and `LLM` have the config. Values are in its
    `plugin_options`, and those of a dataclass in `config.section(Dataclass)`. What gets no config reads what
    `on_startup` kept in its module, in the same process.
    """


@hookspec
def register_metric_sinks() -> Iterable[MetricSinkSpec]:  # type: ignore[empty-body]
    """Places where figures go.

    Called: once per process at start-up; `make` once, in the supervisor.
    Returns: MetricSinkSpecs.
    Chosen by: all that `--plugins` admits receive every record.
    """


@hookspec
def build_layer(layer: torch.nn.Module, info: LayerInfo) -> torch.nn.Module | None:
    """Wrap or replace a layer while the model is built (probes, adapters, offloading).

    Called: once per block of the model, for every plugin in the order of their names; each gets what the one
    before returned.
    Returns: a module called as `layer(x, step)`, or None to leave the layer as it is; an exception ends the start,
    because a model that is wrapped in part would answer wrongly. It may wrap the block or modules inside it. Weights
    come later, into each wherever its wrapper keeps it as a submodule; parameters of the wrapper are its own to fill.
    Chosen by: every plugin has its say.
    """


@hookspec
def on_startup(config: Config) -> None:
    """The process starts.

    Called: once per process after plugins are loaded, before anything is built.
    Returns: nothing; a ConfigError ends the start-up with its text, any other exception is logged.
    Chosen by: every plugin has its say.
    """


@hookspec
def on_model_built(report: ModelReport) -> None:
    """The model is loaded and its kernels are bound.

    Called: once per engine, before the first request.
    Returns: nothing; an exception is logged with the plugin's name.
    Chosen by: every plugin has its say.
    """


@hookspec
def on_request_finished(record: RequestRecord) -> None:
    """A request ended: completed, aborted or failed.

    Called: once per request, after its last byte: in the HTTP worker one after the other, on a thread of their own,
        so that one may take its time (10,000 that wait are enough: further ones are dropped); or by LLM.generate.
    Returns: nothing; an exception is logged with the plugin's name.
    Chosen by: every plugin has its say.
    """


@hookspec
def on_shutdown() -> None:
    """The process ends.

    Called: once per process that called `on_startup`, when nothing runs any more; also where its start was interrupted
        or failed, but not where it is killed. A plugin that was not started, because of another's ConfigError, is not
        called.
    Returns: nothing; an exception is logged with the plugin's name.
    Chosen by: every plugin has its say.
    """


HOOKS: dict[str, Any] = {
    name: value for name, value in list(globals().items()) if name.startswith(("register_", "build_", "on_"))
}
