"""Plugin `faults`: failures on request in a test server, through the hooks that any plugin has.

Only `llmcore testserver --fault_injection` and `llmcore_devtools.server.serving(faults=True)` load it.
`llmcore_devtools.fault_names` has the faults that a prompt can cause. The logits processor `fault` causes others.
"""

from __future__ import annotations

from collections.abc import Iterable

import orjson
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
from llmcore.config import Config

from llmcore_devtools.fault_names import HOOK_REQUEST_ID, Panic

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
