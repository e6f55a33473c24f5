"""The contributions of the loaded plugins: specs by kind, each with its plugin, and the hooks that observe.

`llmcore.registry.loader.build_registry` builds a registry from the config's list of plugins. No registry is global.
"""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import json
import logging
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from functools import cache
from importlib.resources import files
from typing import Any, TypeVar, cast

import pluggy

from llmcore.api import hookspecs, specs
from llmcore.api.counters import TALLIES
from llmcore.api.errors import (
    ConfigError,
    LlmcoreError,
    PluginError,
    did_you_mean,
    message_of,
    reraise_if_stopping,
    text_of,
)
from llmcore.api.models import LayerInfo
from llmcore.api.processors import LogitsProcessorSpec
from llmcore.api.specs import API_VERSION, ModelSpec, PluginInfo, Spec
from llmcore.config import Config, settings
from llmcore.config.process import shortage_of
from llmcore.registry.well_formed import misfit

log = logging.getLogger("llmcore.registry.loader")

S = TypeVar("S", bound=Spec)

CONTRIBUTIONS: Mapping[str, type[Spec]] = {
    "register_models": specs.ModelSpec,
    "register_ops": specs.OpSpec,
    "register_kernels": specs.KernelSpec,
    "register_modes": specs.ModeSpec,
    "register_devices": specs.DeviceSpec,
    "register_schedulers": specs.SchedulerSpec,
    "register_length_estimators": specs.LengthEstimatorSpec,
    "register_balancers": specs.BalancerSpec,
    "register_kv_layouts": specs.KVLayoutSpec,
    "register_kv_managers": specs.KVManagerSpec,
    "register_model_sources": specs.ModelSourceSpec,
    "register_weight_loaders": specs.WeightLoaderSpec,
    "register_quant_methods": specs.QuantMethodSpec,
    "register_tokenizers": specs.TokenizerSpec,
    "register_output_parsers": specs.OutputParserSpec,
    "register_dialects": specs.DialectSpec,
    "register_logits_processors": LogitsProcessorSpec,
    "register_commands": specs.CommandSpec,
    "register_options": specs.OptionSpec,
    "register_metric_sinks": specs.MetricSinkSpec,
}
"""`register_*` hook -> the spec that it returns."""

KIND_NAMES: Mapping[type[Spec], str] = {
    kind: hook.removeprefix("register_").removesuffix("s").replace("_", " ") for hook, kind in CONTRIBUTIONS.items()
}

MOST_ERROR = 1000
"""Characters of a plugin's error that are shown."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+/-]*")
_COMMAND = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*( (--)?[A-Za-z0-9][A-Za-z0-9_-]*)?")
"""A command, a command of a group, or an option that is a command (specs.CommandSpec)."""


@dataclasses.dataclass(frozen=True)
class Failure:
    """A plugin that does not take part: the stage in which it failed, the error, and the user's fix."""

    plugin: PluginInfo
    stage: str
    error: str
    fix: str
    fatal: bool = False

    def __str__(self) -> str:
        origin = f"{self.plugin.dist} {self.plugin.version}".strip()
        return f"plugin {self.plugin.name!r} ({origin}) failed in {self.stage}: {self.error.rstrip('.')}; {self.fix}"


@dataclasses.dataclass(frozen=True)
class Declined:
    """A contribution that this core cannot use, although its plugin works."""

    spec: Spec
    plugin: PluginInfo
    reason: str

    def __str__(self) -> str:
        return f"plugin {self.plugin.name!r}: {KIND_NAMES[type(self.spec)]} {self.spec.name!r} is {self.reason}"


def fix_for(plugin: PluginInfo, error: BaseException) -> str:
    """The user's fix for a plugin that raised `error`."""
    without = f"leave it out with --plugins=-{plugin.name}"
    if isinstance(error, ModuleNotFoundError) and error.name:
        return f"install {error.name.partition('.')[0]!r}, or {without}"
    if shortage := shortage_of(error):
        return shortage
    return f"upgrade or repair it, or {without}"


class Registry:
    """Specs and observing hooks of the plugins that take part.

    `failures`: plugins that do not take part. `declined`: contributions that are not used.
    """

    def __init__(self, plugins: Sequence[PluginInfo], order: Sequence[str] = ()) -> None:
        self.plugins: list[PluginInfo] = []
        self.failures: list[Failure] = []
        self.declined: list[Declined] = []
        self.offered = tuple(plugins)
        self.order = tuple(order)
        """Plugins that the user named, in order of preference."""
        self._specs: dict[type[Spec], dict[tuple[str, ...], tuple[Spec, PluginInfo]]] = {}
        self._told: set[tuple[str, str]] = set()
        self.manager = pluggy.PluginManager("llmcore")
        self.manager.add_hookspecs(hookspecs)

    # --- building ----------------------------------------------------------------------------------------------

    def add(self, info: PluginInfo, load: Callable[[PluginInfo], object]) -> None:
        """Load one plugin and take its contributions: all of them, or none and a Failure."""
        stage, taken = "import", list[Spec]()
        try:
            # A plugin may print while it loads, which must not get into a command's output.
            with redirect_stdout(sys.stderr):
                module = load(info)
                stage = "registration"
                self.manager.register(module, name=info.name)
                self._check_names(info)
                _check_marks(module)
                implemented = {caller.name for caller in self.manager.get_hookcallers(module) or ()}
                for hook in [name for name in CONTRIBUTIONS if name in implemented]:
                    stage = hook
                    taken += self._contributions(hook, info)
        except BaseException as error:  # noqa: BLE001 - whatever a plugin raises is its own failure
            reraise_if_stopping(error)
            self.fail(info, stage, error)
            return
        self.plugins.append(info)
        for spec in taken:
            self.take(spec, info)

    def fail(self, info: PluginInfo, stage: str, error: BaseException) -> None:
        """Record that a plugin failed, and remove it. The failure is fatal if the user named the plugin."""
        text = " ".join((message_of(error) if isinstance(error, LlmcoreError) else text_of(error)).split())
        self.failures.append(Failure(info, stage, text[:MOST_ERROR], fix_for(info, error), info.name in self.order))
        if self.manager.has_plugin(info.name):
            self.manager.unregister(name=info.name)

    def _check_names(self, info: PluginInfo) -> None:
        try:
            self.manager.check_pending()
        except pluggy.PluginValidationError as error:
            module = self.manager.get_plugin(info.name)
            unknown = [c.name for c in self.manager.get_hookcallers(module) or () if not c.has_spec()]
            hints = " ".join(f"there is no hook {name!r}.{did_you_mean(name, hookspecs.HOOKS)}" for name in unknown)
            raise PluginError(hints) from error

    def _contributions(self, hook: str, info: PluginInfo) -> list[Spec]:
        expected = CONTRIBUTIONS[hook]
        good: list[Spec] = []
        for spec in (spec for result in self.caller(hook, info.name)() for spec in _listed(result)):
            if not isinstance(spec, expected):
                raise PluginError(f"returned a {type(spec).__name__}, needs {expected.__name__}")
            if wrong := misfit(spec):
                raise PluginError(wrong)
            if not (_COMMAND if expected is specs.CommandSpec else _NAME).fullmatch(spec.name):
                raise PluginError(f"{spec.name!r} is no name: letters, digits and _ . + / - only")
            if spec.api != API_VERSION:
                older = info.dist if spec.api < API_VERSION else "llmcore-engine"
                reason = f"written for plugin interface {spec.api}, this core speaks {API_VERSION}: upgrade {older}"
                self.declined.append(Declined(spec, info, reason))
                continue
            if isinstance(spec, specs.OptionSpec):
                settings([spec])
            good.append(spec)
        return good

    def take(self, spec: Spec, info: PluginInfo) -> None:
        """Keep one contribution of a plugin. A second one with its name is a fatal Failure."""
        kept, key = self._specs.setdefault(type(spec), {}), _identity(spec)
        if key not in kept:
            kept[key] = spec, info
            return
        _, owner = kept[key]
        clash = f"{KIND_NAMES[type(spec)]} {spec.name!r} is also registered by plugin {owner.name!r}"
        fix = f"leave one out: --plugins=-{info.name} or --plugins=-{owner.name}"
        if owner == info:
            fix = f"rename one, or {fix_for(info, PluginError()).partition(', or ')[2]}"
        self.failures.append(Failure(info, "registration", clash, fix, fatal=True))

    def caller(self, hook: str, plugin: str) -> pluggy.HookCaller:
        """The hook as one plugin implements it. If the plugin does not implement it, a call returns []."""
        impls = getattr(self.manager.hook, hook).get_hookimpls()
        others = [impl.plugin for impl in impls if impl.plugin_name != plugin]
        return self.manager.subset_hook_caller(hook, others)

    # --- asking ------------------------------------------------------------------------------------------------

    def specs(self, kind: type[S]) -> list[tuple[S, PluginInfo]]:
        """Every contribution of one kind with its plugin: by plugin, in the order in which the plugin gave them."""
        return cast("list[tuple[S, PluginInfo]]", list(self._specs.get(kind, {}).values()))

    def implementers(self, hook: str) -> list[PluginInfo]:
        """The plugins that implement a hook, by name."""
        names = {impl.plugin_name for impl in getattr(self.manager.hook, hook).get_hookimpls()}
        return [info for info in self.plugins if info.name in names]

    def find(self, kind: type[S], name: str) -> S:
        """The contribution called `name`, as `owned`."""
        return self.owned(kind, name)[0]

    def owned(self, kind: type[S], name: str) -> tuple[S, PluginInfo]:
        """The contribution of one kind called `name`, with its plugin.

        Raises ConfigError that names the package that has it, or the known ones.
        """
        pairs = self.specs(kind)
        for pair in pairs:
            if pair[0].name == name:
                return pair
        what = KIND_NAMES[kind]
        why = "".join(f"; plugin {d.plugin.name!r} has one, {d.reason}" for d in self.declined if d.spec.name == name)
        if dist := known_plugins().get(name):
            raise ConfigError(f"there is no {what} {name!r}{why}; {dist}, which is not active, brings it")
        known = sorted(spec.name for spec, _ in pairs)
        exist = ", ".join(known) or "none"
        raise ConfigError(f"there is no {what} {name!r}{why}; known: {exist}.{did_you_mean(name, known)}")

    def model_for(self, architectures: Sequence[str]) -> ModelSpec:
        """The family of the first known name in a checkpoint's `architectures`. Raises ConfigError."""
        models = self.specs(ModelSpec)
        for architecture in architectures:
            claims = [(spec, plugin) for spec, plugin in models if architecture in spec.architectures]
            if len(claims) > 1:
                raise ConfigError(f"{architecture} is claimed by {either_of(claims)}")
            if claims:
                return claims[0][0]
        raise ConfigError(self._unknown_architecture(architectures))

    def _unknown_architecture(self, architectures: Sequence[str]) -> str:
        if not architectures:
            return "the model's config names no architecture: config.json needs `architectures`"
        known = sorted({name for spec, _ in self.specs(ModelSpec) for name in spec.architectures})
        text = "; ".join([f"unknown architecture {architectures[0]!r}", *map(str, self.failures)])
        for architecture in architectures:
            if dist := known_plugins().get(architecture):
                return f"{text}: pip install {dist}"
        exist = ", ".join(known) or "none"
        guess = did_you_mean(architectures[0], known)
        return f"{text}: no plugin is known to bring it; installed ones serve {exist}.{guess}"

    def fingerprint(self) -> str:
        """A digest of the plugins and their contributions. Processes that run the same steps must have equal ones."""
        specs = {kind.__name__: self.specs(kind) for kind in self._specs}
        text = json.dumps({"plugins": self.plugins, "specs": specs}, sort_keys=True, default=_plain)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    # --- hooks that observe or build ---------------------------------------------------------------------------

    def call(self, hook: str, **arguments: Any) -> None:
        """Call an `on_*` hook of every plugin.

        An exception is logged with the plugin's name, the first time with a traceback. A ConfigError from on_startup
        is raised.
        """
        for info in self.implementers(hook):
            self._call(info, hook, arguments)

    @contextmanager
    def lifetime(self, config: Config) -> Iterator[None]:
        """Call `on_startup` of every plugin, and `on_shutdown` when the block ends, even by an exception.

        Use it once per process. If a ConfigError ends the start, plugins whose `on_startup` has not run get no
        `on_shutdown` either.
        """
        unaware = self.implementers("on_startup")
        try:
            while unaware:
                self._call(unaware.pop(0), "on_startup", {"config": config})
            yield
        finally:
            for info in self.implementers("on_shutdown"):
                if info not in unaware:
                    self._call(info, "on_shutdown", {})

    def _call(self, info: PluginInfo, hook: str, arguments: Mapping[str, Any]) -> None:
        try:
            self.caller(hook, info.name)(**arguments)
        except BaseException as error:
            reraise_if_stopping(error)
            if hook == "on_startup" and isinstance(error, ConfigError):
                raise
            first = (info.name, hook) not in self._told
            self._told.add((info.name, hook))
            TALLIES.count("plugin_failures", info.name, hook)
            request = getattr(arguments.get("record"), "request_id", None)
            of = f" of request {request}" if request else ""
            text = f"plugin {info.name!r} ({info.dist} {info.version}) failed in {hook}{of}"
            log.error("%s: %s", text, text_of(error), exc_info=error if first else None)

    def wrap_layer(self, layer: Any, info: LayerInfo) -> Any:
        """`layer` after every plugin's `build_layer`, in the order of the plugins' names.

        Raises PluginError that names the plugin that failed.
        """
        for plugin in self.implementers("build_layer"):
            what = f"plugin {plugin.name!r} failed in build_layer of {info.name!r}"
            try:
                results = self.caller("build_layer", plugin.name)(layer=layer, info=info)
            except BaseException as error:
                reraise_if_stopping(error)
                raise PluginError(f"{what}: {text_of(error)}; {fix_for(plugin, error)}") from error
            layer = results[-1] if results else layer
            if not hasattr(layer, "named_parameters"):
                raise PluginError(f"{what}: it returned a {type(layer).__name__}, needs a torch.nn.Module or None")
        return layer


def either_of(rivals: Sequence[tuple[Spec, PluginInfo]]) -> str:
    """Contributions of which one is too many, for an error: their names, and the options that leave one out."""
    who = ", ".join(f"{spec.name} of plugin {plugin.name!r}" for spec, plugin in rivals)
    return f"{who}; leave one out with {' or '.join(f'--plugins=-{plugin.name}' for _, plugin in rivals)}"


def _check_marks(module: object) -> None:
    """Raises PluginError if a function with a hook's name is not marked as one, or if the module has no hook."""
    marked = [name for name in hookspecs.HOOKS if hasattr(getattr(module, name, None), "llmcore_impl")]
    unmarked = [
        name for name in hookspecs.HOOKS if name not in marked and inspect.isfunction(getattr(module, name, None))
    ]
    if unmarked:
        raise PluginError(f"{', '.join(unmarked)}: not marked with @hookimpl of llmcore.api")
    if not marked:
        raise PluginError("it has no hook: mark its functions with @hookimpl of llmcore.api")


def _listed(result: object) -> Iterable[Spec]:
    """The result of a hook, which must be several specs."""
    if isinstance(result, Spec):
        raise PluginError(f"returned one {type(result).__name__}; yield it, or return a list")
    return cast("Iterable[Spec]", result)


def _identity(spec: Spec) -> tuple[str, ...]:
    if isinstance(spec, specs.OutputParserSpec):
        return spec.kind, spec.name
    return (spec.op, spec.name) if isinstance(spec, specs.KernelSpec) else (spec.name,)


def _plain(value: Any) -> Any:
    """A form for JSON, the same in every process: sets are sorted, functions become their names."""
    if dataclasses.is_dataclass(value):
        return {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, frozenset):
        return sorted(repr(item) for item in value)
    return f"{value.__module__}:{value.__qualname__}"


@cache
def known_plugins() -> Mapping[str, str]:
    """Architecture, op or KV layout -> the plugin's distribution that brings it, from generated package data."""
    text = files("llmcore.registry").joinpath("known_plugins.json").read_text(encoding="utf-8")
    return cast("dict[str, str]", json.loads(text))
