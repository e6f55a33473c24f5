"""Every hook, typed. A hook's docstring is its contract: when it is called, what it returns, how core chooses.

`register_*` hooks contribute frozen specs at start-up and may be generators. `llmcore.registry.resolve` or a name
chooses among the specs; the order of registration plays no part. `build_*` hooks run while a model is built, `on_*`
hooks observe. No hook runs inside a step.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import pluggy

if TYPE_CHECKING:
    import torch

    from llmcore.api.models import LayerInfo, ModelReport
    from llmcore.api.processors import LogitsProcessorSpec
    from llmcore.api.protocols import RequestRecord
    from llmcore.api.specs import (
        BalancerSpec,
        CommandSpec,
        DeviceSpec,
        DialectSpec,
        KernelSpec,
        KVLayoutSpec,
        KVManagerSpec,
        LengthEstimatorSpec,
        MetricSinkSpec,
        ModelSourceSpec,
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
    from llmcore.config import Config

hookspec = pluggy.HookspecMarker("llmcore")
hookimpl = pluggy.HookimplMarker("llmcore")


@hookspec
def register_models() -> Iterable[ModelSpec]:  # type: ignore[empty-body]
    """Model families.

    Called: once per process at start-up.
    Returns: ModelSpecs; their import strings are loaded only for the model that is served.
    Chosen by: the first name in the checkpoint's `architectures`. Two families that claim one name are an error,
    unless `--plugins` leaves only one.
    """


@hookspec
def register_ops() -> Iterable[OpSpec]:  # type: ignore[empty-body]
    """Ops: computations, each with a torch reference.

    Called: once per process at start-up.
    Returns: OpSpecs with names that no other plugin uses.
    Chosen by: the layers that ask for an op by name.
    """


@hookspec
def register_kernels() -> Iterable[KernelSpec]:  # type: ignore[empty-body]
    """Kernels: implementations of ops.

    Called: once per process at start-up; a kernel's `make` at build, once per op, shape and token bucket.
    Returns: KernelSpecs.
    Chosen by: `resolve`: a `--kernel op=name` pin, what fits, priority, measured cost, the narrower requirement,
    the order of `--plugins`. Two kernels that are still equal then are an error.
    """


@hookspec
def register_modes() -> Iterable[ModeSpec]:  # type: ignore[empty-body]
    """Modes: names for `--mode`, each a bundle of pins.

    Called: once per process at start-up.
    Returns: ModeSpecs.
    Chosen by: `--mode`. A mode that does not fit the model or the device is a start-up error that lists the fitting
    ones.
    """


@hookspec
def register_devices() -> Iterable[DeviceSpec]:  # type: ignore[empty-body]
    """Kinds of device.

    Called: once per process at start-up.
    Returns: DeviceSpecs.
    Chosen by: `--device`; `auto` takes the available device with the highest priority.
    """


@hookspec
def register_schedulers() -> Iterable[SchedulerSpec]:  # type: ignore[empty-body]
    """Scheduling policies: they choose the requests of a step, and the number of tokens of each.

    Called: once per process at start-up; `make` once per engine.
    Returns: SchedulerSpecs.
    Chosen by: `--scheduler`. Core validates every plan, so a policy cannot leak or corrupt memory.
    """


@hookspec
def register_length_estimators() -> Iterable[LengthEstimatorSpec]:  # type: ignore[empty-body]
    """Length estimators: they estimate how many tokens a request will still produce, for admission.

    Called: once per process at start-up; `make` once per engine.
    Returns: LengthEstimatorSpecs.
    Chosen by: `--length_estimator`.
    """


@hookspec
def register_balancers() -> Iterable[BalancerSpec]:  # type: ignore[empty-body]
    """Balancers: they choose one of several servers for a request.

    Called: once per process at start-up; `make` once per router.
    Returns: BalancerSpecs.
    Chosen by: `--routing_strategy` of `llmcore route`.
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
    """Prefix-cache policies: they choose which KV to keep after a request, and which to evict first.

    Called: once per process at start-up; `make` once per KV group.
    Returns: KVManagerSpecs.
    Chosen by: `--kv_manager`; `--disable_dynamic_prompt_cache` selects `none`.
    """


@hookspec
def register_model_sources() -> Iterable[ModelSourceSpec]:  # type: ignore[empty-body]
    """Places from which models are fetched by name.

    Called: once per process at start-up; `fetch` once, in the process that the operator started, before a model is
    loaded.
    Returns: ModelSourceSpecs.
    Chosen by: `sniff`, which recognises `--model_dir` where there is no such path. Two sources that recognise it are
    an error that lists them.
    """


@hookspec
def register_weight_loaders() -> Iterable[WeightLoaderSpec]:  # type: ignore[empty-body]
    """Checkpoint formats.

    Called: once per process at start-up; `open` when a model is loaded.
    Returns: WeightLoaderSpecs.
    Chosen by: `sniff`, which recognises `--model_dir`. Two formats that recognise it are an error that lists them.
    """


@hookspec
def register_quant_methods() -> Iterable[QuantMethodSpec]:  # type: ignore[empty-body]
    """Weight quantization: methods that read a checkpoint's quantized tensors, and hold and multiply them in linears.

    Called: once per process at start-up; `reads` and `make` when a model is loaded.
    Returns: QuantMethodSpecs.
    Chosen by: a mode that pins one; else the method that reads the `quantization_config` of config.json. If no method
    or two methods read it, the start ends with an error that lists them.
    """


@hookspec
def register_tokenizers() -> Iterable[TokenizerSpec]:  # type: ignore[empty-body]
    """Sources of tokenizers.

    Called: once per process at start-up.
    Returns: TokenizerSpecs.
    Chosen by: `--tokenizer_mode` and `sniff`. Of several, the highest priority wins.
    """


@hookspec
def register_output_parsers() -> Iterable[OutputParserSpec]:  # type: ignore[empty-body]
    """Parsers of a model's output: tool calls and reasoning, in the notation that the model was trained on.

    Called: once per process at start-up; `make` once per choice of a chat request, in the HTTP worker.
    Returns: OutputParserSpecs.
    Chosen by: `--tool_call_parser` and `--reasoning_parser`, else by the model's chat template (`recognises`). An
    unknown name is a start-up error that lists the known ones.
    """


@hookspec
def register_dialects() -> Iterable[DialectSpec]:  # type: ignore[empty-body]
    """HTTP API shapes.

    Called: once per process at start-up; `make` once per HTTP worker.
    Returns: DialectSpecs.
    Chosen by: `--plugins`; the server serves every dialect that it admits. Two routes with one path are an error.
    """


@hookspec
def register_logits_processors() -> Iterable[LogitsProcessorSpec]:  # type: ignore[empty-body]
    """Logits processors: they change a request's scores before the sampler draws a token.

    Called: once per process at start-up; `make` once per request that asks for it, in the engine.
    Returns: LogitsProcessorSpecs with names that no other plugin uses.
    Chosen by: the request's `logits_processors`, by name. A request with an unknown name is refused, with a list of
    the known ones.
    """


@hookspec
def register_commands() -> Iterable[CommandSpec]:  # type: ignore[empty-body]
    """Subcommands of `llmcore`.

    Called: once per process at start-up; a command is imported when it runs.
    Returns: CommandSpecs with names that neither core nor another plugin uses.
    Chosen by: the command line.
    """


@hookspec
def register_options() -> Iterable[OptionSpec]:  # type: ignore[empty-body]
    """Options of `llmcore serve` that a plugin brings.

    Called: once per process at start-up, before options are parsed.
    Returns: OptionSpecs with names that no other plugin uses. `options_of` makes them from the fields of a frozen
    dataclass.
    Chosen by: the operator. `on_startup`, a dialect's `front` and `LLM` have the config. Values are in its
    `plugin_options`, and those of a dataclass in `config.section(Dataclass)`. A function that gets no config
    reads the values that `on_startup` kept in its module, in the same process.
    """


@hookspec
def register_metric_sinks() -> Iterable[MetricSinkSpec]:  # type: ignore[empty-body]
    """Metric sinks: they receive the server's figures.

    Called: once per process at start-up; `make` once, in the supervisor.
    Returns: MetricSinkSpecs.
    Chosen by: `--plugins`; every sink that it admits receives every record.
    """


@hookspec
def build_layer(layer: torch.nn.Module, info: LayerInfo) -> torch.nn.Module | None:
    """Wrap or replace a layer while the model is built (probes, adapters, offloading).

    Called: once per block of the model, for every plugin in the order of their names. Each plugin gets the module
    that the plugin before it returned.
    Returns: a module called as `layer(x, step)`, or None to leave the layer as it is. The plugin may wrap the block or
    modules inside it, and must keep each wrapped module as a submodule, because weights are loaded later. The plugin
    fills its own parameters. An exception ends the start: a model that is only partly wrapped would answer wrongly.
    Chosen by: every plugin is called.
    """


@hookspec
def on_startup(config: Config) -> None:
    """The process starts.

    Called: once per process after plugins are loaded, before anything is built.
    Returns: nothing; a ConfigError ends the start-up with its text, any other exception is logged.
    Chosen by: every plugin is called.
    """


@hookspec
def on_model_built(report: ModelReport) -> None:
    """The model is loaded and its kernels are bound.

    Called: once per engine, before the first request.
    Returns: nothing; an exception is logged with the plugin's name.
    Chosen by: every plugin is called.
    """


@hookspec
def on_request_finished(record: RequestRecord) -> None:
    """A request ended: completed, aborted or failed.

    Called: once per request, after its last byte, in the HTTP worker or by LLM.generate. The HTTP worker makes the
        calls one after the other on a thread of their own, so a call may be slow. It drops records when 10,000 wait.
    Returns: nothing; an exception is logged with the plugin's name.
    Chosen by: every plugin is called.
    """


@hookspec
def on_shutdown() -> None:
    """The process ends.

    Called: once per process that called `on_startup`, when nothing runs any more. It is also called if the start was
        interrupted or failed, but not if the process is killed. It is not called for a plugin whose `on_startup` did
        not run because another plugin raised a ConfigError.
    Returns: nothing; an exception is logged with the plugin's name.
    Chosen by: every plugin is called.
    """


HOOKS: dict[str, Any] = {
    name: value for name, value in list(globals().items()) if name.startswith(("register_", "build_", "on_"))
}
