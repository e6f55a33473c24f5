"""docs/objects.md: the objects that plugins get and return, from the sources of `llmcore.api`."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator

import llmcore_devtools as testing
from llmcore import api, layers
from llmcore.api import sched, text
from llmcore.api.specs import OpSpec, Spec
from llmcore_devtools import dialect, family, registry_of
from llmcore_server import api as http

INTRODUCTION = """# Objects

<!-- Written by scripts/generate_docs.py from llmcore.api, llmcore.layers and the ops; `make docs` writes it again. -->

What the functions that a spec names are handed, and what they hand back. Import them from `llmcore.api`,
`llmcore.api.sched`, `llmcore_server.api`, `llmcore.api.text` or `llmcore.layers`, as the heading says. A protocol is a
contract, not a base class: any class with these attributes and methods keeps it. [hooks.md](hooks.md) has the specs
themselves."""

SOURCES = (
    (
        "Kernels",
        "llmcore.api",
        "OpContext Requires DeviceInfo AttnSpec AttentionKernel AttnRows AttnLimits MetaWriter",
    ),
    ("Families", "llmcore.api", "ModelConfig KVGroupSpec RouteSpec"),
    (
        "Scheduling",
        "llmcore.api.sched",
        "SchedulerLimits SchedulerPolicy SchedulerView RequestInfo WaitingRequest Decision LengthEstimator KVManager",
    ),
    (
        "Logits processors",
        "llmcore.api",
        "ProcessorContext HostProcessor MaskProcessor BiasProcessor DeviceProcessor LogitsProcessor",
    ),
    ("Devices, checkpoints, tokenizers", "llmcore.api", "Device Checkpoint QuantMethod Tokenizer"),
    ("Linears of a quantization method", "llmcore.layers", "LinearMethod LinearShape Bound"),
    ("Observers", "llmcore.api", "LayerInfo ModelReport RequestRecord MetricSink ServerFigures"),
    (
        "Parsers of models' output",
        "llmcore.api.text",
        "ParserContext OutputParser TextDelta ReasoningDelta ToolCallBegun ToolCallDelta ToolCallEnded CallGrammar "
        "ParserSample",
    ),
    ("What a parser's spec says of chat templates", "llmcore.api", "TemplateMarks"),
    ("Requests, for dialects", "llmcore.api", "SamplingParams LengthDecay Submit ChoiceEvent Finish Bridge Load"),
)
"""Heading, module, names. The page shows their source."""

OUTLINES = (
    ("What scheduling policies have in common", "llmcore.api.sched", "Share"),
    (
        "Building blocks of families",
        "llmcore.layers",
        "Build Mesh Layer Decoder Embedding ScaledEmbedding LMHead CappedHead Attention AttentionKernels Linear "
        "QKVLinear PairedQKV apart MergedLinear MLP GatedMLP MoE Dispatched MLA LatentSpec RMSNorm OffsetRMSNorm "
        "LayerNorm Rope NoRope RopeConfig Layout zeros Step Bucketed Rows KVStep spec_of token_slots attend "
        "ReferenceAttention",
    ),
    (
        "Configs and weights of families",
        "llmcore.layers",
        "DenseConfig read_dense dense_weights windowed_groups read_rope expert_names expert_elements read_scoring "
        "scoring_weights",
    ),
    ("Settings of a plugin", "llmcore.api", "option options_of Config without_effect"),
    ("Names in a checkpoint", "llmcore.api", "WeightMap Shard Placement read_dtype"),
    (
        "HTTP",
        "llmcore_server.api",
        "Front Route Request Generation Writer Reply Choice Usage ModelFacts State openai_error as_request_error "
        "retry_headers check clamped guided fitting Asked TypedGrammar typed Listed listed pieces Places "
        "LogprobsLimit room_for_logprobs ErrorAnswer ErrorMembers",
    ),
    (
        "Conversations of any dialect",
        "llmcore_server.api",
        "Conversation ToolChoice guided_calls check_variables filled check_begun thought_of Block TextBlock "
        "ReasoningBlock CallBlock blocks Released released_by_token TokenNames UnshownTokens",
    ),
    (
        "Text",
        "llmcore.api.text",
        "TextRules ChoiceText StopStrings StopMatcher OutputParsers RequestParsing before_tag held_back joined "
        "lark_string Detokenizer detokenizer FastTokenizer load_tokenizer ChatTemplate ChosenTemplate Companions "
        "read_companions",
    ),
    (
        "Errors, and the rest",
        "llmcore.api",
        "LlmcoreError ConfigError RequestError PluginError ResolveError PluginInfo Graph bucket_of words_of",
    ),
    (
        "Tests",
        "llmcore_devtools",
        "check_plugin check_interpreted Nonconformance registry_of write_fake_model fake_answer",
    ),
    ("Tests of families", "llmcore_devtools.family", "assert_family_matches_transformers LoadedModel"),
    ("Tests of dialects", "llmcore_devtools.dialect", "Side"),
)
"""Heading, module, names. The page shows their signatures and docstrings."""

MODULES = {"llmcore.api": api, "llmcore.api.sched": sched, "llmcore_server.api": http, "llmcore.api.text": text}
MODULES |= {"llmcore.layers": layers, "llmcore_devtools": testing}
ELSEWHERE = {"llmcore_devtools.family": family, "llmcore_devtools.dialect": dialect}
"""Modules of which the page shows a part. It shows everything public of `MODULES`."""

ON_HOOKS_PAGE = frozenset({"hookimpl"})
"""Shown on the page of hooks, like every spec."""


def objects_page() -> str:
    """Returns the whole page."""
    text = "\n".join([INTRODUCTION, *_ops(), *_sources(), *_outlines(), *_intake(), *_values()])
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
            yield f"```py\n{inspect.getsource(getattr((MODULES | ELSEWHERE)[module], name)).rstrip()}\n```\n"


def _outlines() -> Iterator[str]:
    for heading, module, names in OUTLINES:
        yield f"\n## {heading} (`{module}`)\n"
        for name in names.split():
            yield from _outline(name, getattr((MODULES | ELSEWHERE)[module], name))


def _intake() -> Iterator[str]:
    yield "\n## Steps that dialects share (`llmcore_server.api.intake`)\n"
    for name, function in inspect.getmembers(http.intake, inspect.isfunction):
        if not name.startswith("_") and function.__module__ == http.intake.__name__:
            yield from _outline(name, function)


def _values() -> Iterator[str]:
    """Yields constants and types, and checks that the page lacks nothing public."""
    shown = {name for _, _, names in (*SOURCES, *OUTLINES) for name in names.split()}
    yield "\n## Constants and types\n"
    yield "| Name | From | Value |"
    yield "| --- | --- | --- |"
    for module, found in MODULES.items():
        for name in sorted(set(found.__all__) - shown - ON_HOOKS_PAGE):
            value = getattr(found, name)
            if inspect.ismodule(value) or (inspect.isclass(value) and issubclass(value, Spec)):
                continue
            if inspect.isclass(value) or inspect.isfunction(value):
                raise SystemExit(f"{module}.{name} is on no page: name it in scripts/page_of_objects.py")
            # the order of a frozenset differs between runs
            value = sorted(value) if isinstance(value, frozenset) else value
            text = re.sub(r"\b(typing|collections\.abc|llmcore(\.\w+)+)\.", "", repr(value))
            yield f"| `{name}` | `{module}` | `{text.replace('|', chr(92) + '|')}` |"


def _outline(name: str, value: object) -> Iterator[str]:
    yield f"**`{name}{_signature(value)}`** {_prose(value)}\n"
    if not inspect.isclass(value):
        return
    members = [(key, item) for key, item in vars(value).items() if not key.startswith("_")]
    for key, item in members:
        function = item.fget if isinstance(item, property) else inspect.unwrap(getattr(item, "__func__", item))
        if inspect.isfunction(function) and function.__doc__:
            shown = key if isinstance(item, property) else f"{key}{_signature(function)}"
            yield f"- `.{shown}`: {_prose(function)}"
    yield ""


def _signature(value: object) -> str:
    try:
        text = str(inspect.signature(value))  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return ""
    text = re.sub(r"\((self|cls)(, )?", "(", text.replace("'", "").replace(" -> None", ""))
    return re.sub(r"<factory>|<object object at \w+>", "...", re.sub(r"<function (\w+) at \w+>", r"\1", text))


def _prose(value: object) -> str:
    text = inspect.cleandoc(getattr(value, "__doc__", None) or "")
    return " ".join(text.split()).replace("](", "] (")  # a subscript followed by a call is not a link
