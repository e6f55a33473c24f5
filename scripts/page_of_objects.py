"""docs/objects.md and docs/objects/: the public objects by what an author writes, from signatures and docstrings."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import llmcore_devtools as testing
from llmcore import api, layers, ops
from llmcore.api import balancing, child_pool, sched, text
from llmcore.api.specs import OpSpec, Spec
from llmcore.ops import attention
from llmcore.registry.loader import CORE_DIST
from llmcore_devtools import dialect, family, registry_of
from llmcore_server import api as http

MODULES = {
    "llmcore.api": api,
    "llmcore.api.balancing": balancing,
    "llmcore.api.child_pool": child_pool,
    "llmcore.api.sched": sched,
    "llmcore.api.text": text,
    "llmcore.layers": layers,
    "llmcore_server.api": http,
    "llmcore_devtools": testing,
}
"""Modules of which the pages show everything public."""

ELSEWHERE = {
    "llmcore_devtools.family": family,
    "llmcore_devtools.dialect": dialect,
    "llmcore_server.api.intake": http.intake,
    "llmcore.ops": ops,
    "llmcore.ops.attention": attention,
}
"""Modules of which the pages show what `TASKS` names."""

ON_HOOKS_PAGE = frozenset({"hookimpl"})
"""Shown on the page of hooks, as every spec is."""

WIDE, LONG = 100, 60
"""Characters of a signature's line, and of a value that is shown."""

Sections = tuple[tuple[str, str, str], ...]
"""Heading, module, names."""


@dataclass(frozen=True)
class Task:
    """One page. `constants`: the modules whose constants and types it lists."""

    slug: str
    title: str
    about: str
    sections: Sections
    constants: tuple[str, ...] = ()

    @property
    def names(self) -> list[str]:
        return [name for _, _, names in self.sections for name in names.split()]


TASKS = (
    Task(
        "plugin",
        "Any plugin",
        "Settings, errors and facts that every kind of plugin may use ([how to write one](../authors.md)).",
        (
            ("Settings", "llmcore.api", "option options_of Config without_effect child_environment preset PluginInfo"),
            ("Errors", "llmcore.api", "LlmcoreError ConfigError RequestError PluginError ResolveError words_of"),
            ("Foreign programs", "llmcore.api.child_pool", "ChildPool Limits ChildEnded NoChild serve"),
        ),
        ("llmcore.api",),
    ),
    Task(
        "kernel",
        "A kernel, an op or a device",
        "The arguments of kernels ([how to write one](../authors/kernel.md)), and the contract of a device "
        "([how to write one](../authors/device.md)).",
        (
            ("The choice of a kernel", "llmcore.api", "OpContext Requires DeviceInfo bucket_of"),
            ("Attention kernels", "llmcore.api", "AttnSpec AttentionKernel AttnRows AttnLimits MetaWriter"),
            ("Samples of an op", "llmcore.ops", "draw draws_on size"),
            (
                "Samples of an attention op",
                "llmcore.ops.attention",
                "rows",
            ),
            ("Ops over several ranks", "llmcore.layers", "Peers over"),
            ("Devices", "llmcore.api", "Device Graph"),
        ),
    ),
    Task(
        "family",
        "A model family",
        "The config that a family reads, and the layers that it composes ([how to write one](../authors/family.md)). "
        "T is the number of tokens of a step.",
        (
            ("Configs", "llmcore.api", "ModelConfig KVGroupSpec RouteSpec read_dtype"),
            (
                "Reading a config.json",
                "llmcore.layers",
                "DenseConfig read_dense windowed_groups read_rope read_scoring",
            ),
            ("Names of weights", "llmcore.api", "WeightMap Shard Placement"),
            (
                "Names that families share",
                "llmcore.layers",
                "dense_weights scoring_weights expert_names expert_elements",
            ),
            ("Building", "llmcore.layers", "Build Mesh tensor_parallel Layer Decoder spec_of shape_of"),
            ("Embeddings and heads", "llmcore.layers", "Embedding ScaledEmbedding LMHead CappedHead held_tokens"),
            ("Linears", "llmcore.layers", "Linear QKVLinear PairedQKV apart MergedLinear Partial"),
            ("Feed-forward parts", "llmcore.layers", "MLP GatedMLP MoE Dispatched"),
            (
                "Attention",
                "llmcore.layers",
                "Attention AttentionKernels attend ReferenceAttention",
            ),
            ("Norms and rope", "llmcore.layers", "RMSNorm OffsetRMSNorm LayerNorm Rope NoRope RopeConfig"),
            ("A step", "llmcore.layers", "Step Bucketed Rows KVStep"),
        ),
        ("llmcore.layers",),
    ),
    Task(
        "storage",
        "A KV layout, a checkpoint format, a source of models, a quantization method or a tokenizer",
        "Objects that store KV and weights ([layout](../authors/kv-layout.md), "
        "[checkpoint](../authors/checkpoint.md), [model source](../authors/model-source.md), "
        "[quantization](../authors/quant.md)).",
        (
            ("KV layouts", "llmcore.layers", "Layout zeros token_slots"),
            ("Checkpoints and tokenizers", "llmcore.api", "Checkpoint Tokenizer"),
            ("Sources of models", "llmcore.api", "FetchedModel"),
            ("Quantization", "llmcore.api", "QuantMethod"),
            (
                "Linears of a quantization method",
                "llmcore.layers",
                "LinearMethod LinearShape Bound InputForm Rounded Source Unquantized MethodFor create_linears "
                "fill_normal packing packed ExpertMethod ExpertShape BoundExperts PlainExperts ExpertsFor",
            ),
        ),
    ),
    Task(
        "scheduling",
        "A scheduler, a prefix cache, a length estimator or a balancer",
        "Policies decide, and the engine validates ([scheduler](../authors/scheduler.md), "
        "[prefix cache](../authors/kv-manager.md), [length estimator](../authors/length-estimator.md), "
        "[balancer](../authors/balancer.md)).",
        (
            (
                "Schedulers",
                "llmcore.api.sched",
                "SchedulerPolicy SchedulerView RequestInfo WaitingRequest Decision SchedulerLimits Share",
            ),
            ("Length estimators and prefix caches", "llmcore.api.sched", "LengthEstimator KVManager"),
            ("Balancers", "llmcore.api.balancing", "Balancer Arrival Candidate"),
        ),
        ("llmcore.api.sched", "llmcore.api.balancing"),
    ),
    Task(
        "logits",
        "A logits processor",
        "Four kinds of processors change scores ([how to write one](../authors/logits-processor.md)).",
        (
            (
                "Processors",
                "llmcore.api",
                "ProcessorContext LogitsProcessor HostProcessor MaskProcessor BiasProcessor DeviceProcessor",
            ),
        ),
    ),
    Task(
        "text",
        "A parser of models' output, and other text",
        "From text to tool calls and reasoning ([how to write a parser](../authors/parser.md)), and the text tools "
        "that dialects share.",
        (
            ("Parsers", "llmcore.api.text", "ParserContext OutputParser ParserSample CallGrammar"),
            (
                "Events",
                "llmcore.api.text",
                "TextDelta ReasoningDelta ToolCallBegun ToolCallDelta ToolCallEnded",
            ),
            ("Chat templates that a parser's spec recognises", "llmcore.api", "TemplateMarks"),
            ("Tools for parsers", "llmcore.api.text", "before_tag held_back joined lark_string one_call_each"),
            (
                "Text of answers",
                "llmcore.api.text",
                "TextRules ChoiceText StopStrings StopMatcher Detokenizer detokenizer",
            ),
            (
                "Tokenizers and templates",
                "llmcore.api.text",
                "FastTokenizer load_tokenizer ChatTemplate ChosenTemplate Companions read_companions",
            ),
        ),
        ("llmcore.api.text",),
    ),
    Task(
        "dialect",
        "An HTTP dialect",
        "From a client's JSON to a request, and from events to an answer ([how to write one](../authors/dialect.md)).",
        (
            ("Requests", "llmcore.api", "Prompt Submit SamplingParams LengthDecay Bridge ChoiceEvent Finish Load"),
            (
                "HTTP",
                "llmcore_server.api",
                "Front Route Draws Request Generation Writer Reply Choice Usage ModelFacts State ErrorAnswer "
                "ErrorMembers openai_error as_request_error refusal retry_headers check clamped",
            ),
            (
                "Conversations and tools",
                "llmcore_server.api",
                "Conversation ToolChoice Turn OutputParsers RequestParsing reasoning_variables template_knows "
                "check_variables check_results filled Block TextBlock ReasoningBlock CallBlock blocks BlockStream "
                "BlockEvent BlockBegun BlockDelta BlockEnded Released released_by_token TokenNames "
                "UnshownTokens",
            ),
            ("Answers that fit", "llmcore_server.api", "guided fitting Asked TypedGrammar typed"),
            ("Embeddings", "llmcore_server.api", "Vectors normalized check_texts"),
            (
                "Large answers",
                "llmcore_server.api",
                "Listed listed pieces Places LogprobsLimit room_for_logprobs",
            ),
            (
                "Steps from a body to a request",
                "llmcore_server.api.intake",
                " ".join(
                    name
                    for name, function in inspect.getmembers(http.intake, inspect.isfunction)
                    if not name.startswith("_") and function.__module__ == http.intake.__name__
                ),
            ),
        ),
        ("llmcore_server.api",),
    ),
    Task(
        "observer",
        "An observer",
        "The reports that hooks and metric sinks receive ([how to write one](../authors/observe.md), "
        "[metric sink](../authors/metric-sink.md)).",
        (("Reports", "llmcore.api", "LayerInfo ModelReport RequestRecord MetricSink ServerFigures"),),
    ),
    Task(
        "test",
        "Tests of a plugin",
        "Conformance checks and fakes, of the distribution llmcore-devtools.",
        (
            (
                "Any plugin",
                "llmcore_devtools",
                "check_plugin check_interpreted Nonconformance registry_of write_fake_model fake_answer",
            ),
            ("Families", "llmcore_devtools.family", "assert_family_matches_transformers LoadedModel"),
            ("Dialects", "llmcore_devtools.dialect", "Side"),
        ),
    ),
)

WRITTEN = "<!-- Written by scripts/generate_docs.py from the code; `make docs` writes it again. -->"
INDEX = f"""# Objects

{WRITTEN}

The objects that a plugin receives, returns or builds on, one page for each thing to write. An entry has the signature,
the meaning, and the fields with their units. A protocol is a contract, not a base class: any class with these
attributes and methods keeps it. [hooks.md](hooks.md) has the specs that hooks return.
"""


def object_pages() -> dict[str, Callable[[], str]]:
    """Returns path -> the function that writes the page."""
    pages = {f"docs/objects/{task.slug}.md": partial(task_page, task) for task in TASKS}
    return {"docs/objects.md": index_page, **pages}


def index_page() -> str:
    """Returns the table of contents. Raises SystemExit if a public name is on no page."""
    shown = {name for task in TASKS for name in task.names}
    for module, found in MODULES.items():
        for name in set(found.__all__) - shown - ON_HOOKS_PAGE:
            value = getattr(found, name)
            if (inspect.isclass(value) and not issubclass(value, Spec)) or inspect.isfunction(value):
                raise SystemExit(f"{module}.{name} is on no page: name it in scripts/page_of_objects.py")
    lines = [INDEX]
    for task in TASKS:
        lines.append(f"## [{task.title}](objects/{task.slug}.md)\n")
        if task.slug == "kernel":
            lines.append(f"- [Ops](objects/{task.slug}.md#ops): arguments and results of every op")
        for heading, _, names in task.sections:
            lines.append(f"- [{heading}](objects/{task.slug}.md#{anchor(heading)}): {_listed(names)}")
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def task_page(task: Task) -> str:
    """Returns the page of one task."""
    lines = [f"# {task.title}\n\n{WRITTEN}\n\n{task.about} [All objects](../objects.md).\n"]
    if task.slug == "kernel":
        lines += _ops()
    for heading, module, names in task.sections:
        lines.append(f"## {heading}\n\nFrom `{module}`.\n")
        for name in names.split():
            lines += _entry(name, getattr((MODULES | ELSEWHERE)[module], name))
    for module in task.constants:
        lines += _constants(module)
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).rstrip() + "\n"


def anchor(heading: str) -> str:
    """Returns the name of a heading in links."""
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")


def _listed(names: str) -> str:
    return ", ".join(f"`{name}`" for name in names.split())


def _ops() -> Iterator[str]:
    yield "## Ops\n"
    yield "Arguments and results of each op's kernel, in this order. `llmcore kernels --explain --model MODEL` shows"
    yield "the `OpContext.shape` that a model asks for. `llmcore/ops/<op>.py` has an op's meaning and tolerance. A"
    yield "plugin's op has them in the plugin.\n"
    yield "| Op | A kernel is | Becomes, without one of its own |"
    yield "| --- | --- | --- |"
    for spec, plugin in sorted(registry_of().specs(OpSpec), key=lambda pair: pair[1].dist != CORE_DIST):
        signature = f"`{spec.signature}`" if "->" in spec.signature else spec.signature
        owner = "" if plugin.dist == CORE_DIST else f" ({plugin.dist})"
        yield f"| `{spec.name}`{owner} | {_cell(signature)} | {', '.join(spec.expands_to)} |"
    yield ""


def _constants(module: str) -> Iterator[str]:
    """Yields the table of a module's values that no section names."""
    shown = {name for task in TASKS for name in task.names} | ON_HOOKS_PAGE
    yield f"## Constants and types\n\nFrom `{module}`.\n"
    yield "| Name | Value |"
    yield "| --- | --- |"
    for name in sorted(set(MODULES[module].__all__) - shown):
        value = getattr(MODULES[module], name)
        if inspect.ismodule(value) or inspect.isclass(value):
            continue
        # the order of a frozenset differs between runs
        shown_as = _plain(repr(sorted(value) if isinstance(value, frozenset) else value))
        if isinstance(value, dict) and len(shown_as) > 2 * WIDE:
            shown_as = f"a mapping with the keys {', '.join(value)}"
        yield f"| `{name}` | `{_cell(shown_as)}` |"


def _entry(name: str, value: object) -> Iterator[str]:
    yield f"### {name}\n"
    protocol = inspect.isclass(value) and getattr(value, "_is_protocol", False)
    yield f"```py\n{f'class {name}(Protocol)' if protocol else _signature(name, value)}\n```\n"
    yield from _documented(value)
    if inspect.isclass(value):
        yield from _fields(value)
        yield from _methods(value)
    yield ""


def _fields(kind: type) -> Iterator[str]:
    """Yields the fields that have a docstring beside them, and the attributes of a protocol."""
    body = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0]
    assert isinstance(body, ast.ClassDef)
    for field, beside in zip(body.body, [*body.body[1:], None], strict=True):
        if not (isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)):
            continue
        noted = isinstance(beside, ast.Expr) and isinstance(beside.value, ast.Constant)
        says = f": {_line(ast.literal_eval(beside.value))}" if noted else ""  # type: ignore[union-attr]
        if noted:
            yield f"- `{field.target.id}`{says}"
        elif getattr(kind, "_is_protocol", False):
            yield f"- `{field.target.id}: {ast.unparse(field.annotation)}`"


def _methods(kind: type) -> Iterator[str]:
    for key, item in vars(kind).items():
        function = item.fget if isinstance(item, property) else inspect.unwrap(getattr(item, "__func__", item))
        if key.startswith("_") or not inspect.isfunction(function) or not function.__doc__:
            continue
        if isinstance(item, property):
            yield f"- `.{key}`: {_line(function.__doc__)}"
            continue
        signature = _signature(f".{key}", function)
        paragraphs = list(_documented(function))
        if "\n" not in signature and len(paragraphs) == 2:
            yield f"- `{signature}`: {paragraphs[0].strip()}"
            continue
        if "\n" not in signature:
            yield f"- `{signature}`"
        else:
            yield f"- `.{key}`\n\n{textwrap.indent(f'```py{chr(10)}{signature[1:]}{chr(10)}```', '  ')}\n"
        yield "\n" + textwrap.indent("\n".join(paragraphs).rstrip(), "  ") + "\n"


def _signature(name: str, value: object) -> str:
    """Returns the signature, on several lines if it is long. Long defaults are left out."""
    try:
        found = inspect.signature(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return name
    parameters = [item for key, item in found.parameters.items() if key not in ("self", "cls")]
    if [str(item.kind) for item in parameters] == ["VAR_POSITIONAL", "VAR_KEYWORD"]:
        return name
    parts: list[str] = []
    for item in parameters:
        if item.kind is item.KEYWORD_ONLY and not any(part.startswith("*") for part in parts):
            parts.append("*")
        parts.append(_parameter(item))
    returns = found.return_annotation
    end = "" if returns in (found.empty, None, "None") else f" -> {_plain(_annotation(returns))}"
    line = f"{name}({', '.join(parts)}){end}"
    if len(line) <= WIDE:
        return line
    return f"{name}(\n" + "".join(f"    {part},\n" for part in parts) + f"){end}"


def _parameter(item: inspect.Parameter) -> str:
    stars = {item.VAR_POSITIONAL: "*", item.VAR_KEYWORD: "**"}.get(item.kind, "")
    typed = "" if item.annotation is item.empty else f": {_plain(_annotation(item.annotation))}"
    if item.default is item.empty:
        return f"{stars}{item.name}{typed}"
    default = _plain(repr(item.default))
    # a default that a function makes has no readable form
    default = "..." if len(default) > LONG or default.startswith("<") else default
    return f"{item.name}{typed} = {default}" if typed else f"{item.name}={default}"


def _annotation(value: object) -> str:
    return value if isinstance(value, str) else inspect.formatannotation(value)


def _plain(value: str) -> str:
    """Returns a type or a value without the modules that it comes from."""
    value = re.sub(r"ForwardRef\('(.*?)'\)", r"\1", value)
    return re.sub(r"\b(?:typing|collections\.abc|numpy|llmcore\w*(?:\.[a-z_]\w*)*)\.(?=[A-Za-z])", "", value)


_ITEM = re.compile(r"(?:^|(?<=[.:)] ))(?=`\w+`(?:(?:,| and) `\w+`)*(?: \[[^\]]*\](?: \w+)?)?: )")


def _documented(value: object) -> Iterator[str]:
    """Yields a docstring's paragraphs. Sentences that begin with "`name`:" become items of a list."""
    for paragraph in inspect.cleandoc(getattr(value, "__doc__", None) or "").split("\n\n"):
        if paragraph.lstrip().startswith(("- ", "* ", "    ")):
            yield f"{_safe(paragraph)}\n"
            continue
        first, *items = _ITEM.split(_line(paragraph))
        if first.strip():
            yield f"{first.strip()}\n"
        yield from (f"- {item.strip()}" for item in items)
        yield ""


def _line(doc: str) -> str:
    return " ".join(_safe(doc).split())


def _safe(doc: str) -> str:
    """A subscript followed by a call is not a link."""
    return doc.replace("``", "`").replace("](", "] (")


def _cell(value: str) -> str:
    return value.replace("|", "\\|")
