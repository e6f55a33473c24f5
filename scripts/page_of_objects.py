"""docs/objects.md: what plugins are handed and what they hand back, from the sources of `llmcore.api`."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator

from llmcore import api, layers
from llmcore.api import http, sched, text
from llmcore.specs import OpSpec
from llmcore.testing import registry_of

INTRODUCTION = """# Objects

<!-- Written by scripts/generate_docs.py from llmcore.api, llmcore.layers and the ops; `make docs` writes it again. -->

What the functions that a spec names are handed, and what they hand back. Import them from `llmcore.api`,
`llmcore.api.sched`, `llmcore.api.http`, `llmcore.api.text` or `llmcore.layers`, as the heading says. A protocol is a
contract, not a base class: any class with these attributes and methods keeps it. [hooks.md](hooks.md) has the specs
themselves."""

SOURCES = (
    (
        "Kernels",
        "llmcore.api",
        "OpContext Requires DeviceInfo AttnSpec AttentionKernel AttnRows AttnLimits MetaWriter",
    ),
    ("Families", "llmcore.api", "ModelConfig KVGroupSpec"),
    (
        "Scheduling",
        "llmcore.api.sched",
        "SchedulerLimits SchedulerPolicy SchedulerView WaitingRequest Decision LengthEstimator KVManager",
    ),
    (
        "Logits processors",
        "llmcore.api",
        "ProcessorContext HostProcessor MaskProcessor BiasProcessor DeviceProcessor LogitsProcessor",
    ),
    ("Devices, checkpoints, tokenizers", "llmcore.api", "Device Checkpoint QuantMethod Tokenizer"),
    ("Linears of a quantization method", "llmcore.layers", "LinearMethod LinearShape Bound"),
    ("Observers", "llmcore.api", "LayerInfo ModelReport RequestRecord MetricSink"),
    (
        "Parsers of models' output",
        "llmcore.api.text",
        "ParserContext OutputParser TextDelta ReasoningDelta ToolCallBegun ToolCallDelta ToolCallEnded",
    ),
    ("Requests, for dialects", "llmcore.api", "SamplingParams LengthDecay Submit ChoiceEvent Finish Bridge Load"),
)
"""Heading, module, names: shown as they stand in the source."""

OUTLINES = (
    (
        "Building blocks of families",
        "llmcore.layers",
        "Build Decoder Embedding LMHead Attention QKVLinear Linear MergedLinear GatedMLP MoE MLA LatentSpec RMSNorm "
        "Rope Layout Step KVStep read_rope spec_of token_slots attend ReferenceAttention",
    ),
    ("Names in a checkpoint", "llmcore.api", "WeightMap Shard Placement read_dtype"),
    ("HTTP", "llmcore.api.http", "Front Route Job Generation Writer Reply Choice Usage ModelFacts"),
    ("Text", "llmcore.api.text", "TextRules StopStrings OutputParsers RequestParsing before_tag held_back joined"),
)
"""Heading, module, names: shown as signatures and docstrings."""

MODULES = {"llmcore.api": api, "llmcore.api.sched": sched, "llmcore.api.http": http, "llmcore.api.text": text}
MODULES["llmcore.layers"] = layers


def objects_page() -> str:
    """The whole page."""
    text = "\n".join([INTRODUCTION, *_ops(), *_sources(), *_outlines(), *_intake()])
    return re.sub(r"\n{3,}(?!class|@|def)", "\n\n", text).rstrip() + "\n"


def _ops() -> Iterator[str]:
    yield "\n## Ops\n"
    yield "Arguments and results of each op's kernel, in this order. `llmcore kernels --explain --model MODEL` shows"
    yield "the `OpContext.shape` that a model asks for; `llmcore/ops/<op>.py` is the meaning, with the tolerance.\n"
    yield "| Op | A kernel is | Becomes, without one of its own |"
    yield "| --- | --- | --- |"
    for spec, _ in registry_of("ops").specs(OpSpec):
        signature = f"`{spec.signature}`" if "->" in spec.signature else spec.signature
        yield f"| `{spec.name}` | {signature.replace('|', chr(92) + '|')} | {', '.join(spec.expands_to)} |"


def _sources() -> Iterator[str]:
    for heading, module, names in SOURCES:
        yield f"\n## {heading} (`{module}`)\n"
        for name in names.split():
            yield f"```py\n{inspect.getsource(getattr(MODULES[module], name)).rstrip()}\n```\n"


def _outlines() -> Iterator[str]:
    for heading, module, names in OUTLINES:
        yield f"\n## {heading} (`{module}`)\n"
        for name in names.split():
            yield from _outline(name, getattr(MODULES[module], name))


def _intake() -> Iterator[str]:
    yield "\n## Steps that dialects share (`llmcore.api.http.intake`)\n"
    for name, function in inspect.getmembers(http.intake, inspect.isfunction):
        if not name.startswith("_") and function.__module__ == http.intake.__name__:
            yield from _outline(name, function)


def _outline(name: str, value: object) -> Iterator[str]:
    yield f"**`{name}{_signature(value)}`** {_prose(value)}\n"
    if not inspect.isclass(value):
        return
    members = [(key, item) for key, item in vars(value).items() if not key.startswith("_")]
    for key, item in members:
        function = item.fget if isinstance(item, property) else item
        if inspect.isfunction(function) and function.__doc__:
            shown = key if isinstance(item, property) else f"{key}{_signature(function)}"
            yield f"- `.{shown}`: {_prose(function)}"
    yield ""


def _signature(value: object) -> str:
    try:
        text = str(inspect.signature(value))  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return ""
    text = re.sub(r"\(self(, )?", "(", text.replace("'", "").replace(" -> None", ""))
    return re.sub(r"<factory>|<object object at \w+>", "...", re.sub(r"<function (\w+) at \w+>", r"\1", text))


def _prose(value: object) -> str:
    text = inspect.cleandoc(getattr(value, "__doc__", None) or "")
    return " ".join(text.split()).replace("](", "] (")  # a call of an item is no link
