"""What plugins contribute: frozen values that import no torch. This module knows nothing else of llmcore.

A spec names code by *import string* (``"package.module:attribute"``), so listing plugins imports none of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

API_VERSION = 1
"""Version of the plugin interface that this core speaks; a spec of an unknown version is declined."""

ImportString = str
"""``"package.module:attribute"``, imported only when its spec was chosen."""

DType = Literal["f32", "f16", "bf16"]

TOKEN_BUCKETS: tuple[tuple[int, int | None], ...] = ((1, 1), (2, 16), (17, 64), (65, 256), (257, None))
"""Inclusive ranges of tokens an op sees in a step; every op is resolved once per bucket."""


def bucket_of(tokens: int) -> int:
    """Index into `TOKEN_BUCKETS` of a step of `tokens` tokens (at least 1)."""
    for index, (_, last) in enumerate(TOKEN_BUCKETS):
        if last is None or tokens <= last:
            return index
    raise AssertionError("the last bucket is open")


# --- the machine, and what a choice depends on -----------------------------------------------------------------


@dataclass(frozen=True)
class DeviceInfo:
    """One accelerator, or the CPU. `capability` is the compute capability as 10 x major + minor (90), else None.

    `processors`: parts that run blocks of a kernel independently (an accelerator's multiprocessors), 0 if unknown.
    """

    type: str
    name: str = ""
    capability: int | None = None
    memory: int = 0
    processors: int = 0


@dataclass(frozen=True, kw_only=True)
class OpContext:
    """All that the choice of a kernel may depend on; `shape` holds the op's fixed sizes by name.

    `deterministic`: a row's result may not depend on the batch around it, to the bit.
    """

    op: str
    device: DeviceInfo
    dtype: DType
    layout: str | None = None
    granule: int = 1
    bucket: int = 0
    shape: Mapping[str, int | float | str | bool | None] = field(default_factory=dict)
    deterministic: bool = False


@dataclass(frozen=True, kw_only=True)
class Requires:
    """What a kernel needs; an empty field means "any". Ranges are inclusive.

    `shape` maps a name of `OpContext.shape` to the values a kernel was written for.
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
    """`value`, which must not be one string where several are meant."""
    if isinstance(value, str):
        raise TypeError(f"{name} is one string, {value!r}; put it into a tuple or a set")
    return value


# --- contributions ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Spec:
    """What every contribution carries: its name in pins and listings, and the interface it was written for."""

    name: str
    api: int = API_VERSION
    summary: str = ""


@dataclass(frozen=True, kw_only=True)
class ModelSpec(Spec):
    """A model family: which checkpoints it reads and how.

    `read_config`: (Hugging Face config as a dict) -> ModelConfig. `build`: (ModelConfig, layers.Build) -> the
    model. `weights`: (ModelConfig) -> WeightMap, from the names in a checkpoint to parameters.
    """

    architectures: tuple[str, ...]
    read_config: ImportString
    build: ImportString
    weights: ImportString

    def __post_init__(self) -> None:
        _several(self.architectures, "architectures")


@dataclass(frozen=True, kw_only=True)
class OpSpec(Spec):
    """An op: `module` holds `reference`, `make`, `samples`, `TOLERANCE` and `cost` (see llmcore.ops).

    A composite names the ops it `expands_to`; it is used where a kernel for it fits, else its expansion is.
    `row_wise`: the reference computes each row from that row alone, in an order that no other row changes.
    """

    module: str
    signature: str
    expands_to: tuple[str, ...] = ()
    row_wise: bool = False


@dataclass(frozen=True, kw_only=True)
class KernelSpec(Spec):
    """One implementation of one op. `make`: (OpContext) -> the bound callable, or an attention kernel.

    `refuses`: (OpContext) -> why this kernel declines, or None; for what `when` cannot say. `cost`: import string
    of (OpContext) -> measured microseconds on this device, or None where nobody measured. `batch_invariant`: where
    `OpContext.deterministic` is set, a row's result has the same bits in every batch and every token bucket.

    `tolerance`: dtype -> the largest error relative to the largest expected value, for a kernel that is less exact
    than its op's TOLERANCE asks; dtypes that it leaves out keep the op's.
    """

    op: str
    make: ImportString
    when: Requires = Requires()
    priority: int = 50
    refuses: Callable[[OpContext], str | None] | None = None
    cost: ImportString | None = None
    batch_invariant: bool = False
    tolerance: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class ModeSpec(Spec):
    """A name of `--mode`, as data: the layout, kernels (op -> kernel name) and quantization method it pins."""

    layout: str | None = None
    kernels: Mapping[str, str] = field(default_factory=dict)
    quant: str | None = None


@dataclass(frozen=True, kw_only=True)
class DeviceSpec(Spec):
    """A kind of device. `make`: () -> protocols.Device; `available`: () -> why it cannot be used here, or None.

    `named`: (str) -> DeviceInfo | None, for devices of this kind that need not be here ("sm90"); no torch.
    """

    make: ImportString
    available: ImportString
    named: ImportString | None = None
    priority: int = 50


@dataclass(frozen=True, kw_only=True)
class SchedulerSpec(Spec):
    """`make`: (protocols.SchedulerLimits) -> protocols.SchedulerPolicy. `priorities`: it heeds the `priority` of
    requests; where it does not, a request that has one is refused.
    """

    make: ImportString
    priorities: bool = False


@dataclass(frozen=True, kw_only=True)
class LengthEstimatorSpec(Spec):
    """`make`: (protocols.SchedulerLimits) -> protocols.LengthEstimator."""

    make: ImportString


@dataclass(frozen=True, kw_only=True)
class KVLayoutSpec(Spec):
    """`make`: (KVGroupSpec, granule, dtype) -> layers.layout.Layout.

    `tolerance`: the largest error of what is gathered after a write, relative to the largest value written. The
    default is what 8 bits allow.
    """

    make: ImportString
    tolerance: float = 0.01


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
class QuantMethodSpec(Spec):
    """A way to hold quantized weights. `make`: (quantization_config, ModelConfig) -> protocols.QuantMethod.

    `reads`: (quantization_config of a checkpoint, never empty) -> bool, cheap: whether this method reads it. `plain`:
    it also takes checkpoints that are not quantized, where a mode pins it; `make` then gets {}.
    """

    make: ImportString
    reads: ImportString | None = None
    plain: bool = False


@dataclass(frozen=True, kw_only=True)
class TokenizerSpec(Spec):
    """A source of tokenizers. `sniff`: (Path) -> bool.

    Either `load`: (Path) -> protocols.Tokenizer, light enough for an HTTP worker; or `convert`: (Path, out: Path)
    -> None, which writes tokenizer.json and its companions once, in a process of its own that then exits.
    `mode` is the `--tokenizer_mode` it serves.
    """

    sniff: ImportString
    load: ImportString | None = None
    convert: ImportString | None = None
    mode: Literal["fast", "slow"] = "fast"
    priority: int = 50


@dataclass(frozen=True, kw_only=True)
class DialectSpec(Spec):
    """An HTTP API shape. `make`: (api.http.Front) -> an iterable of api.http.Route."""

    make: ImportString


@dataclass(frozen=True, kw_only=True)
class TemplateMarks:
    """How a chat template shows that a parser is for its model: it holds all of `texts` and none of `without`."""

    texts: tuple[str, ...]
    without: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _several(self.texts, "texts")
        _several(self.without, "without")

    def fit(self, template: str) -> bool:
        """True for a chat template of such a model."""
        return all(text in template for text in self.texts) and not any(text in template for text in self.without)


@dataclass(frozen=True, kw_only=True)
class OutputParserSpec(Spec):
    """A parser of models' output. `make`: (api.text.ParserContext) -> api.text.OutputParser, once per choice.

    `kind`: "tool" parsers find calls of functions, "reasoning" parsers what the model thinks before it answers; the
    two have names of their own. `special_tokens`: texts of special tokens that the parser has to see, which otherwise
    are left out of a model's text. `call_tags`: what calls begin with, for reasoning parsers, which let a call end a
    thought that the model forgot to end. `call_id_size`: the letters and digits that the templates of such models want
    calls' ids to have. `samples`: () -> an iterable of api.text.ParserSample, for the conformance check.

    `grammar`: (api.text.ParserContext) -> api.text.CallGrammar, how calls of the context's tools are written, by which
    they are forced and their arguments made to fit; without it requests for that are refused. `thought_tags`: what a
    reasoning parser's thoughts begin and end with: an answer that has to fit something begins after them.

    `template`: an api.text.ChosenTemplate, a generic chat template that shows tools and writes calls as the parser
    reads them. `--chat_template NAME` takes it by the parser's name, for models whose own has no place for tools.

    `recognises`: the parser is chosen for a model with a chat template that fits any of them; of several parsers the
    one of the highest `priority`, then the first by name.
    """

    kind: Literal["tool", "reasoning"]
    make: ImportString
    special_tokens: tuple[str, ...] = ()
    call_tags: tuple[str, ...] = ()
    call_id_size: int | None = None
    grammar: ImportString | None = None
    thought_tags: tuple[str, str] | None = None
    template: ImportString | None = None
    recognises: tuple[TemplateMarks, ...] = ()
    priority: int = 50
    samples: ImportString | None = None

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
    """A subcommand of `llmcore`. `command`: a click.Command.

    The name `bench serve` is the command `serve` of the group `bench`, whoever brings the group. The name
    `kernels --check` is what `llmcore kernels --check` runs: (options, registry) -> None.
    `heading`: where `llmcore --help` lists it. `prepare`: () -> None, called before `command` is imported.
    """

    command: ImportString
    heading: str = "From plugins"
    prepare: ImportString | None = None


@dataclass(frozen=True, kw_only=True)
class OptionSpec(Spec):
    """An option of `llmcore serve` that a plugin brings; read as ``config.plugin_options[name]``.

    `type`: str, int, float or bool (a flag). A `multiple` option is a tuple of it, () by default. On the command line
    it takes the words up to the next option, with `one_word` the next one only. `aliases`: other names of it. An
    option with a `unit` ("tokens") is a count and may be written 32k (32,000) or 32K (32,768). `low` and `high` are
    inclusive. `unset`: a word that means the default. No error shows the value of a `secret` one, and neither does
    `llmcore config show`. Of a `login` one, an address, they hide the user and the password. `first_page`: the short
    `--help` lists it. `variables`: environment variables beside `LLMCORE_NAME` that set it. `serving`: it has an
    effect on a server only, so `LLM` refuses it. `section`: the frozen dataclass it is a field of (`api.options_of`).
    """

    type: type = str
    default: Any = None
    choices: tuple[str, ...] = ()
    multiple: bool = False
    one_word: bool = False
    aliases: tuple[str, ...] = ()
    unit: str | None = None
    low: int | float | None = None
    high: int | float | None = None
    unset: str | None = None
    secret: bool = False
    login: bool = False
    first_page: bool = False
    variables: tuple[str, ...] = ()
    serving: bool = False
    section: Any = None

    def __post_init__(self) -> None:
        _several(self.choices, "choices")
        _several(self.aliases, "aliases")
        _several(self.variables, "variables")


@dataclass(frozen=True, kw_only=True)
class MetricSinkSpec(Spec):
    """`make`: () -> protocols.MetricSink; lives in the supervisor, away from the engine."""

    make: ImportString


# --- provenance ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PluginInfo:
    """One plugin as discovered: frozen into the config and handed to every process."""

    name: str
    dist: str
    version: str
    entry_point: str
