"""The plugin `faults`, and the faults that the text of a request can cause in a server of the fake model. No torch.

`<|fault:NAME|>` in a prompt is one token. It causes the fault NAME when the engine computes it. With `<|later:NAME|>`
the eighth token of the model's answer is the fault's token, so the fault comes after a stream has begun.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

import orjson
from llmcore import __version__
from llmcore.api import (
    ConfigError,
    DeviceSpec,
    KernelSpec,
    KVManagerSpec,
    LogitsProcessorSpec,
    OutputParserSpec,
    RequestRecord,
    Requires,
    TemplateMarks,
    TokenizerSpec,
    hookimpl,
)
from llmcore.api.specs import PluginInfo
from llmcore.config import Config
from llmcore.registry.loader import CORE_DIST, select

STEP_FAULTS: Mapping[str, str] = {
    "forward": "The step raises, whenever it is tried.",
    "forward_once": "The step raises, but not when it is tried again.",
    "nan": "The row's scores are not finite.",
    "oom": "The step finds no memory, whenever it is tried.",
    "oom_once": "The step finds no memory, but does when it is tried again.",
    "sample": "Drawing the row's token raises.",
    "illegal": "The token drawn for the row is not in the vocabulary.",
    "device": "The device fails for good: no step can follow.",
    "slow": "The step takes `SLOW_SECONDS`.",
    "hang": "The step never ends.",
    "exit": "The engine's process ends without a word.",
}
"""Name -> what happens in the engine's step that computes the token."""

ENGINE_FAULTS: Mapping[str, str] = {
    "cache": "The prefix cache raises when the prompt is looked up; it is dismissed, as any policy that raises.",
}
"""Name -> what happens in the engine beside a step."""

WORKER_FAULTS: Mapping[str, str] = {
    "tokenize": "The tokenizer panics on the prompt.",
    "detokenize": "The detokenizer panics on the answer; ask with `later:`.",
    "parser": "The tool-call parser `faults` calls sys.exit() on the answer of a chat with tools; ask with `later:`.",
}
"""Name -> what happens in the HTTP worker."""

HOOK_REQUEST_ID = "fault-hook"
"""`on_request_finished` raises for requests whose `x-request-id` begins like this."""

FAULTS: Mapping[str, str] = {**STEP_FAULTS, **ENGINE_FAULTS, **WORKER_FAULTS}


class Panic(BaseException):
    """Like the panic of a native library: a BaseException that is not an Exception."""


SLOW_SECONDS = 0.5
LATER = 8
"""The number of the token of an answer that `<|later:NAME|>` makes the fault's."""


def fault(name: str) -> str:
    """The text that causes a fault at once. Raises KeyError for an unknown name."""
    return f"<|fault:{name}|>" if FAULTS[name] else ""


def later(name: str) -> str:
    """The text that makes the eighth token of the answer the fault's. Put it at the end of a prompt."""
    return f"<|later:{name}|>" if FAULTS[name] else ""


def fault_texts() -> tuple[str, ...]:
    """All these texts. The tokenizer of a fake model with faults has a token for each."""
    return tuple(make(name) for make in (fault, later) for name in FAULTS)


def with_faults(config: Config) -> Config:
    """`config` with the plugin `faults`. Its prefix cache replaces `radix`."""
    plugin = PluginInfo(NAME, CORE_DIST, __version__, "llmcore_devtools.faults")
    config = replace(config, discovered=(*select(config.plugins.plugins).plugins, plugin))
    if config.scheduling.kv_manager == "radix":
        config = replace(config, scheduling=replace(config.scheduling, kv_manager=NAME))
    return config


NAME = "faults"
TOKENS: dict[str, int] = {}
"""Name of a fault -> its token in the model that this process serves."""

_ENGINE, _WORKER = "llmcore_devtools.faulty_engine", "llmcore_devtools.faulty_worker"


@hookimpl
def on_startup(config: Config) -> None:
    """Read which tokens bring faults."""
    model = orjson.loads((config.model.path / "config.json").read_bytes())
    if "faults" not in model:
        raise ConfigError("the plugin `faults` is for fake models that have faults: see llmcore testserver --help")
    TOKENS.update(model["faults"])


@hookimpl
def register_devices() -> Iterable[DeviceSpec]:
    """The CPU, which can fail for good."""
    yield DeviceSpec(
        name=NAME,
        make=f"{_ENGINE}:make_device",
        available="llmcore_devtools.faulty_worker:always",
        priority=60,
        summary="the CPU, which can fail for good",
    )


@hookimpl
def register_kernels() -> Iterable[KernelSpec]:
    """Sampling that fails on marked rows."""
    yield KernelSpec(
        op="sample",
        name=NAME,
        make=f"{_ENGINE}:make_sampler",
        when=Requires(device="cpu"),
        priority=90,
        summary="fails where the fake model has marked a row",
    )


@hookimpl
def register_kv_managers() -> Iterable[KVManagerSpec]:
    """The radix cache, which raises on some prompts."""
    yield KVManagerSpec(name=NAME, make=f"{_ENGINE}:make_manager", summary="radix, and raises when it is told to")


@hookimpl
def register_logits_processors() -> Iterable[LogitsProcessorSpec]:
    """`{"name": "fault", "args": {"at": "mask", "how": "raise", "after": 3}}` in a request."""
    yield LogitsProcessorSpec(
        name="fault",
        make=f"{_ENGINE}:make_processor",
        example={"at": "never"},
        summary="raises, hangs or says nonsense where it is told to",
    )


@hookimpl
def register_tokenizers() -> Iterable[TokenizerSpec]:
    """tokenizer.json, which raises on some texts."""
    yield TokenizerSpec(
        name=NAME, sniff=f"{_WORKER}:has_tokenizer_json", load=f"{_WORKER}:load_tokenizer", priority=90
    )


@hookimpl
def register_output_parsers() -> Iterable[OutputParserSpec]:
    """A parser of tool calls that finds none and raises on some texts."""
    yield OutputParserSpec(
        name=NAME,
        kind="tool",
        make=f"{_WORKER}:make_parser",
        recognises=(TemplateMarks(texts=("<|im_start|>assistant",)),),
        priority=90,
        summary="finds no calls, and raises when it is told to",
    )


@hookimpl
def on_request_finished(record: RequestRecord) -> None:
    """Raise for requests whose id asks for it."""
    if record.request_id.startswith(HOOK_REQUEST_ID):
        raise Panic("the hook was told to fail")
