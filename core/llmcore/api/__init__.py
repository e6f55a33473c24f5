"""The interface that plugins import. No torch here; torch building blocks are in `llmcore.layers`."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llmcore.api.bridge import (
        MOST_LOGPROBS_AT_ONCE,
        Bridge,
        ChoiceEvent,
        Finish,
        LengthDecay,
        Load,
        LogitsProcessor,
        Prompt,
        SamplingParams,
        Submit,
    )
    from llmcore.api.counters import CAUSES, COUNTS, GAP_SECONDS, ServerFigures
    from llmcore.api.errors import ConfigError, LlmcoreError, PluginError, RequestError, ResolveError
    from llmcore.api.hookspecs import hookimpl
    from llmcore.api.models import (
        AttnSpec,
        FetchedModel,
        KVGroupSpec,
        LayerInfo,
        ModelConfig,
        ModelReport,
        RouteSpec,
        read_dtype,
    )
    from llmcore.api.processors import (
        BiasProcessor,
        DeviceProcessor,
        HostProcessor,
        LogitsProcessorSpec,
        MaskProcessor,
        ProcessorContext,
        words_of,
    )
    from llmcore.api.protocols import (
        AttentionKernel,
        AttnLimits,
        AttnRows,
        Checkpoint,
        Device,
        Graph,
        MetaWriter,
        MetricSink,
        QuantMethod,
        RequestRecord,
        Tokenizer,
    )
    from llmcore.api.specs import (
        API_VERSION,
        TOKEN_BUCKETS,
        BalancerSpec,
        CommandSpec,
        DeviceInfo,
        DeviceSpec,
        DialectSpec,
        DType,
        KernelSpec,
        KVLayoutSpec,
        KVManagerSpec,
        LengthEstimatorSpec,
        MetricSinkSpec,
        ModelSourceSpec,
        ModelSpec,
        ModeSpec,
        OpContext,
        OpSpec,
        OptionSpec,
        OutputParserSpec,
        PluginInfo,
        QuantMethodSpec,
        Requires,
        SchedulerSpec,
        TemplateMarks,
        TokenizerSpec,
        WeightLoaderSpec,
        bucket_of,
    )
    from llmcore.config import Config, Origins, child_environment, option, options_of, preset, without_effect
    from llmcore.weights.map import Placement, Shard, WeightMap

__all__ = [
    "API_VERSION",
    "CAUSES",
    "COUNTS",
    "GAP_SECONDS",
    "MOST_LOGPROBS_AT_ONCE",
    "TOKEN_BUCKETS",
    "AttentionKernel",
    "AttnLimits",
    "AttnRows",
    "AttnSpec",
    "BalancerSpec",
    "BiasProcessor",
    "Bridge",
    "Checkpoint",
    "ChoiceEvent",
    "CommandSpec",
    "Config",
    "ConfigError",
    "DType",
    "Device",
    "DeviceInfo",
    "DeviceProcessor",
    "DeviceSpec",
    "DialectSpec",
    "FetchedModel",
    "Finish",
    "Graph",
    "HostProcessor",
    "KVGroupSpec",
    "KVLayoutSpec",
    "KVManagerSpec",
    "KernelSpec",
    "LayerInfo",
    "LengthDecay",
    "LengthEstimatorSpec",
    "LlmcoreError",
    "Load",
    "LogitsProcessor",
    "LogitsProcessorSpec",
    "MaskProcessor",
    "MetaWriter",
    "MetricSink",
    "MetricSinkSpec",
    "ModeSpec",
    "ModelConfig",
    "ModelReport",
    "ModelSourceSpec",
    "ModelSpec",
    "OpContext",
    "OpSpec",
    "OptionSpec",
    "Origins",
    "OutputParserSpec",
    "Placement",
    "PluginError",
    "PluginInfo",
    "ProcessorContext",
    "Prompt",
    "QuantMethod",
    "QuantMethodSpec",
    "RequestError",
    "RequestRecord",
    "Requires",
    "ResolveError",
    "RouteSpec",
    "SamplingParams",
    "SchedulerSpec",
    "ServerFigures",
    "Shard",
    "Submit",
    "TemplateMarks",
    "Tokenizer",
    "TokenizerSpec",
    "WeightLoaderSpec",
    "WeightMap",
    "bucket_of",
    "child_environment",
    "hookimpl",
    "option",
    "options_of",
    "preset",
    "read_dtype",
    "without_effect",
    "words_of",
]

_HOMES = (
    *("llmcore.api.specs", "llmcore.api.hookspecs", "llmcore.api.protocols", "llmcore.api.models"),
    *("llmcore.api.processors", "llmcore.api.bridge", "llmcore.api.counters", "llmcore.api.errors"),
    *("llmcore.config", "llmcore.weights.map"),
)
"""Modules that define the names above."""


def __getattr__(name: str) -> object:
    # At first use, because importing a contract (llmcore.api.specs) imports this module too: the settings need
    # contracts, and the settings are shown here.
    if name in __all__:
        for home in map(import_module, _HOMES):
            if hasattr(home, name):
                return globals().setdefault(name, getattr(home, name))
    raise AttributeError(f"module 'llmcore.api' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
