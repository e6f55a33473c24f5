"""The specs that plugins contribute: frozen values without torch. This module imports no other module of llmcore.

A spec names code by *import string* (``"package.module:attribute"``), so listing plugins imports none of it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

API_VERSION = 1
"""Version of this core's plugin interface. A spec of an unknown version is declined."""

ImportString = str
"""``"package.module:attribute"``, imported only when its spec is chosen."""

DType = Literal["f32", "f16", "bf16"]

TOKEN_BUCKETS: tuple[tuple[int, int | None], ...] = ((1, 1), (2, 16), (17, 64), (65, 256), (257, None))
"""Inclusive ranges of an op's tokens in a step. Every op is resolved once per bucket."""


_LAST = tuple(last for _, last in TOKEN_BUCKETS if last is not None)


def bucket_of(tokens: int) -> int:
    """Index into `TOKEN_BUCKETS` of a step of `tokens` tokens (at least 1)."""
    return bisect_left(_LAST, tokens)


# --- the machine, and what a choice depends on -----------------------------------------------------------------


@dataclass(frozen=True)
class DeviceInfo:
    """One accelerator, or the CPU.

    `capability`: the compute capability as 10 x major + minor (90), or None. `memory`: bytes. `processors`: parts that
    run blocks of a kernel independently (an accelerator's multiprocessors), 0 if unknown.
    """

    type: str
    name: str = ""
    capability: int | None = None
    memory: int = 0
    processors: int = 0


@dataclass(frozen=True, kw_only=True)
class OpContext:
    """Everything that the choice of a kernel may depend on.

    `shape`: the op's fixed sizes by name. `deterministic`: a row's result must have the same bits in every batch.
    """

    op: str
    device: DeviceInfo
    dtype: DType
    layout: str | None = None
    granule: int = 1
    bucket: int = 0
    shape: Mapping[str, int | float | str | bool | None] = field(default_factory=dict)
    deterministic: bool = False
    kernel: str = ""
    """The kernel that `KernelSpec.make` makes or `KernelSpec.cost` is asked about; empty elsewhere."""
    gather: Callable[..., Any] | None = field(default=None, compare=False, repr=False)
    """For attention, the `gather` of the group's llmcore.layers.Layout, through which any layout can be read. None if
    keys and values are stored as in the layout `token`."""
    peers: Any = field(default=None, compare=False, repr=False)
    """For an op over several ranks, the llmcore.layers.Peers of its mesh group; None if the ranks are not joined."""


@dataclass(frozen=True, kw_only=True)
class Requires:
    """A kernel's requirements. An empty field means "any". Ranges are inclusive.

    `shape` maps a name of `OpContext.shape` to the values that the kernel supports.
    """

    device: str | None = None
    capability: tuple[int, int] | None = None
    dtypes: frozenset[str] = frozenset()
    layouts: frozenset[str] = frozenset()
    granules: frozenset[int] = frozenset()
    buckets: frozenset[int] = frozenset()
    shape: Mapping[str, frozenset[int | float | str | bool | None]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("dtypes", "layouts", "granules", "buckets"):
            object.__setattr__(self, name, frozenset(_several(getattr(self, name), name)))
        object.__setattr__(self, "shape", {name: frozenset(_several(v, name)) for name, v in self.shape.items()})
        unknown = self.dtypes - set(get_args(DType))
        if unknown:
            raise ValueError(f"dtypes: {', '.join(sorted(unknown))} is none of {', '.join(get_args(DType))}")


def _several(value: Any, name: str) -> Any:
    """`value`. Raises TypeError if it is one string instead of a collection of strings."""
    if isinstance(value, str):
        raise TypeError(f"{name} is one string, {value!r}; put it into a tuple or a set")
    return value


# --- contributions ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Spec:
    """The base of every contribution. `name`: used in pins and listings. `api`: version of the plugin interface."""

    name: str
    api: int = API_VERSION
    summary: str = ""


@dataclass(frozen=True, kw_only=True)
class ModelSpec(Spec):
    """A model family."""

    architectures: tuple[str, ...]
    """The names in a checkpoint's `architectures` that it serves."""
    read_config: ImportString
    """(Hugging Face config as a dict) -> ModelConfig."""
    build: ImportString
    """(ModelConfig, layers.Build) -> the model."""
    weights: ImportString
    """(ModelConfig) -> WeightMap, from the names in a checkpoint to parameters."""

    def __post_init__(self) -> None:
        _several(self.architectures, "architectures")


@dataclass(frozen=True, kw_only=True)
class OpSpec(Spec):
    """An op: `module` holds `reference`, `samples`, `TOLERANCE` and `cost` (see llmcore.ops).

    `expands_to`: the ops that a composite consists of. The composite is used if a kernel for it fits, else these ops
    are. `row_wise`: the reference computes each row from that row alone, in an order that no other row changes.
    """

    module: str
    signature: str
    expands_to: tuple[str, ...] = ()
    row_wise: bool = False


@dataclass(frozen=True, kw_only=True)
class KernelSpec(Spec):
    """One implementation of one op."""

    op: str
    make: ImportString
    """(OpContext) -> the bound callable, or an attention kernel."""
    when: Requires = Requires()
    priority: int = 50
    refuses: Callable[[OpContext], str | None] | None = None
    """(OpContext) -> why the kernel declines, or None. For requirements that `when` cannot express."""
    cost: ImportString | None = None
    """(OpContext) -> microseconds that were measured on this device, or None without a measurement."""
    batch_invariant: bool = False
    """Under `OpContext.deterministic` a row's result has the same bits in every batch and every token bucket."""
    tolerance: Mapping[str, float] = field(default_factory=dict)
    """dtype -> the largest error relative to the largest expected value, for a kernel that is less exact than its op's
    TOLERANCE. Other dtypes keep the op's tolerance."""
    buffers: Mapping[str, int] = field(default_factory=dict)
    """Name -> bytes of device memory for exchanges between ranks. Kernels that give the same name share it."""


@dataclass(frozen=True, kw_only=True)
class ModeSpec(Spec):
    """A name of `--mode`, with the layouts, kernels (op -> kernel name) and quantization method that it pins.

    `layouts`: the layout of a model's KV group -> the one that stores the group instead. A mode fits a model that has
    one of these layouts. `quant_options`: option -> value, for the quantization method of this mode or of a mode that
    is given beside it.
    """

    layouts: Mapping[str, str] = field(default_factory=dict)
    kernels: Mapping[str, str] = field(default_factory=dict)
    quant: str | None = None
    quant_options: Mapping[str, int | str | bool] = field(default_factory=dict)
    asked: tuple[Mapping[str, tuple[Any, ...]], ...] = ()
    """What asks for the mode as `--mode` does: option of a plugin -> values. Each option of one of the mappings must
    have one of its values."""
    dtypes: frozenset[DType] = frozenset()
    """The model's types that it fits; empty: any."""


@dataclass(frozen=True, kw_only=True)
class DeviceSpec(Spec):
    """A kind of device.

    A name such as "sm90" may mean a device of this kind that this machine does not have.
    """

    make: ImportString
    """(index) -> protocols.Device. `index` counts the devices of this kind that the process sees, from 0."""
    available: ImportString
    """() -> why the device cannot be used on this machine, or None if it can."""
    named: ImportString | None = None
    """(such a name) -> DeviceInfo, or None for other names. Without torch."""
    priority: int = 50


@dataclass(frozen=True, kw_only=True)
class SchedulerSpec(Spec):
    """A scheduling policy. `make`: (protocols.SchedulerLimits) -> protocols.SchedulerPolicy.

    `priorities`: the policy uses the `priority` of requests. Without it the engine refuses a request with a priority.
    """

    make: ImportString
    priorities: bool = False


@dataclass(frozen=True, kw_only=True)
class LengthEstimatorSpec(Spec):
    """A length estimator. `make`: (protocols.SchedulerLimits) -> protocols.LengthEstimator."""

    make: ImportString


@dataclass(frozen=True, kw_only=True)
class BalancerSpec(Spec):
    """A balancer. `make`: (random.Random) -> api.balancing.Balancer."""

    make: ImportString


@dataclass(frozen=True, kw_only=True)
class KVLayoutSpec(Spec):
    """A KV layout. `make`: (KVGroupSpec, granule, dtype) -> layers.layout.Layout.

    `tolerance`: the largest error of a gathered value, relative to the largest value written. The default is enough
    for 8 bits.
    """

    make: ImportString
    tolerance: float = 0.01
    calibrate: ImportString | None = None
    """(the layout, ModelConfig, protocols.Checkpoint, config.plugin_options) -> None. It fills the layout's constants.
    The engine calls it once for each KV group, before it allocates KV."""


@dataclass(frozen=True, kw_only=True)
class KVManagerSpec(Spec):
    """A prefix-cache policy. `make`: (granule) -> protocols.KVManager."""

    make: ImportString


@dataclass(frozen=True, kw_only=True)
class WeightLoaderSpec(Spec):
    """A checkpoint format. `sniff`: (Path) -> bool, cheap; `open`: (Path) -> protocols.Checkpoint."""

    sniff: ImportString
    open: ImportString


@dataclass(frozen=True, kw_only=True)
class ModelSourceSpec(Spec):
    """A place from which models are fetched by name."""

    sniff: ImportString
    """(the text of `--model_dir`) -> the name that clients use for the model, or None for a text that names no model
    of this source. It must be cheap, and must not use the network."""
    fetch: ImportString
    """(that text, Config, progress) -> api.FetchedModel, whose path is on this machine. It calls `progress(stage,
    bytes done, bytes in all)` at least once a second. An exception from `progress` means that the fetch must stop.
    Raises ConfigError in one sentence."""
    outline: ImportString | None = None
    """(that text, Config, progress, an empty directory) -> api.FetchedModel in that directory, for `llmcore plan`. Its
    weight files have their true sizes and headers, and holes instead of weights."""
    options: tuple[str, ...] = ()
    """The options that have no effect on a model that is given by its path."""

    def __post_init__(self) -> None:
        _several(self.options, "options")


@dataclass(frozen=True, kw_only=True)
class QuantMethodSpec(Spec):
    """A way to hold quantized weights. `make`: (quantization_config, ModelConfig) -> protocols.QuantMethod.

    `reads`: (quantization_config of a checkpoint, never empty) -> True if this method reads it; cheap. `plain`: a mode
    may pin it for checkpoints that are not quantized; `make` then gets the `quant_options` of the modes. `options`:
    the names of those that modes may choose for it.
    """

    make: ImportString
    reads: ImportString | None = None
    plain: bool = False
    options: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        _several(self.options, "options")


@dataclass(frozen=True, kw_only=True)
class TokenizerSpec(Spec):
    """A source of tokenizers. It has either `load` or `convert`."""

    sniff: ImportString
    """(Path) -> bool."""
    load: ImportString | None = None
    """(Path) -> protocols.Tokenizer, light enough for an HTTP worker."""
    convert: ImportString | None = None
    """(Path, out: Path) -> None. It writes tokenizer.json and its companions once, in a process of its own."""
    mode: Literal["fast", "slow"] = "fast"
    """The value of `--tokenizer_mode` that it serves."""
    priority: int = 50


@dataclass(frozen=True, kw_only=True)
class DialectSpec(Spec):
    """An HTTP API shape. `make`: (llmcore_server.api.Front) -> an iterable of llmcore_server.api.Route."""

    make: ImportString
    environment: Mapping[str, str] = field(default_factory=dict)
    """For clients that read their server's address from the environment: variable -> the path after the server's URL.
    `llmcore serve` prints a line to paste for each."""


@dataclass(frozen=True, kw_only=True)
class TemplateMarks:
    """Marks of a chat template that show a parser's model: the template has all of `texts` and none of `without`."""

    texts: tuple[str, ...]
    without: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _several(self.texts, "texts")
        _several(self.without, "without")

    def fit(self, template: str) -> bool:
        """True if `template` has these marks."""
        return all(text in template for text in self.texts) and not any(text in template for text in self.without)


@dataclass(frozen=True, kw_only=True)
class OutputParserSpec(Spec):
    """A parser of a model's output."""

    kind: Literal["tool", "reasoning"]
    """"tool" parsers find calls of functions. "reasoning" parsers find the model's thoughts before its answer. Two
    parsers of different kinds may have one name."""
    make: ImportString
    """(api.text.ParserContext) -> api.text.OutputParser, once per choice."""
    special_tokens: tuple[str, ...] = ()
    """Texts of special tokens that the parser must see. Without it they are left out of the model's text."""
    call_tags: tuple[str, ...] = ()
    """The beginnings of calls. For a reasoning parser they end a thought that the model did not end."""
    call_id_size: int | None = None
    """The number of letters and digits that the model's chat template needs in the id of a call."""
    grammar: ImportString | None = None
    """(api.text.ParserContext) -> api.text.CallGrammar, the grammar of calls of the context's tools. The server uses
    it to force calls and valid arguments. Without it, the server refuses requests that need them."""
    thought_tags: tuple[str, str] | None = None
    """The begin and end of a reasoning parser's thoughts. A guided answer begins after them."""
    answer_tags: tuple[str, str] = ("", "")
    """The model's markup after its thoughts, and its markup before an answer that is text. A guided answer has it."""
    conversation: ImportString | None = None
    """(messages, tools) -> (messages, tools) as the model's chat template reads them. It is for a tool parser whose
    models' template leaves out or refuses what others show: a second call, thoughts in `reasoning_content`."""
    template: ImportString | None = None
    """An api.text.ChosenTemplate: a generic chat template that shows tools and writes calls as the parser reads them.
    `--chat_template NAME` selects it by the parser's name, for a model whose own template has no place for tools."""
    recognises: tuple[TemplateMarks, ...] = ()
    """The parser is chosen for a model whose chat template fits any of these marks. Of several parsers the one with
    the highest `priority` is chosen, then the first by name."""
    priority: int = 50
    samples: ImportString | None = None
    """() -> an iterable of api.text.ParserSample, for the conformance check."""

    def __post_init__(self) -> None:
        _several(self.special_tokens, "special_tokens")
        _several(self.call_tags, "call_tags")
        _several(self.recognises, "recognises")
        if self.name in ("auto", "none"):
            raise ValueError(
                f"a parser cannot be called {self.name!r}: the option gives that word a meaning of its own"
            )


@dataclass(frozen=True, kw_only=True)
class CommandSpec(Spec):
    """A subcommand of `llmcore`.

    The name `bench serve` is the command `serve` of the group `bench`, which another plugin may bring. The name
    `kernels --check` is the code that `llmcore kernels --check` runs.
    """

    command: ImportString
    """A click.Command. For a name like `kernels --check` a function: (options, registry) -> None."""
    heading: str = "From plugins"
    """The heading under which `llmcore --help` lists it."""
    prepare: ImportString | None = None
    """() -> None, called before `command` is imported."""


@dataclass(frozen=True, kw_only=True)
class OptionSpec(Spec):
    """An option of `llmcore serve` that a plugin brings. Read its value as ``config.plugin_options[name]``."""

    type: type = str
    """str, int, float or bool (a flag)."""
    default: Any = None
    choices: tuple[str, ...] = ()
    multiple: bool = False
    """The value is a tuple, () by default. On the command line the option takes all words up to the next option."""
    one_word: bool = False
    """A `multiple` option takes one word only."""
    aliases: tuple[str, ...] = ()
    unit: str | None = None
    """For example "tokens". The option is then a count and may be written 32k (32,000) or 32K (32,768)."""
    low: int | float | None = None
    """The least value, inclusive."""
    high: int | float | None = None
    """The greatest value, inclusive."""
    unset: str | None = None
    """A word that means the default."""
    secret: bool = False
    """Neither an error nor `llmcore config show` shows the value."""
    private: bool = False
    """Only the process that the operator started has the value. The processes that it starts get neither the value nor
    the variables that set it."""
    login: bool = False
    """The value is an address. Its user and password are hidden like a secret."""
    first_page: bool = False
    """The short `--help` lists the option."""
    variables: tuple[str, ...] = ()
    """Environment variables beside `LLMCORE_NAME` that set the option. `LLMCORE_NAME` wins."""
    serving: bool = False
    """The option has an effect on a server only, so `LLM` refuses it."""
    section: Any = None
    """The frozen dataclass that has the option as a field (`api.options_of`)."""

    def __post_init__(self) -> None:
        _several(self.choices, "choices")
        _several(self.aliases, "aliases")
        _several(self.variables, "variables")


@dataclass(frozen=True, kw_only=True)
class MetricSinkSpec(Spec):
    """A metric sink. `make`: () -> protocols.MetricSink, called in the supervisor."""

    make: ImportString


# --- provenance ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PluginInfo:
    """One plugin as it was discovered. The config holds it, so every process gets it."""

    name: str
    dist: str
    version: str
    entry_point: str
