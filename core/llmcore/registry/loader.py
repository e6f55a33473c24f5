"""The loader: it finds the plugins once, filters them before import, and passes them on as data.

Built-ins load like any other plugin: a list here names them, and no other module imports them.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.metadata import PackageNotFoundError, distributions, requires
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from typing import Any

from llmcore import __version__
from llmcore.api.errors import ConfigError, PluginError, did_you_mean, message_of, reraise_if_stopping, text_of
from llmcore.api.specs import (
    BalancerSpec,
    ImportString,
    KVManagerSpec,
    LengthEstimatorSpec,
    MetricSinkSpec,
    OptionSpec,
    PluginInfo,
    SchedulerSpec,
)
from llmcore.config import Config, make_config
from llmcore.registry.registry import KIND_NAMES, Failure, Registry, fix_for

log = logging.getLogger("llmcore.registry.loader")

Made = BalancerSpec | KVManagerSpec | LengthEstimatorSpec | MetricSinkSpec | SchedulerSpec

GROUP = "llmcore"
"""Entry-point group of plugins."""

CORE_DIST = "llmcore-engine"

EXTRAS = ("server", "devtools")
"""Extras of llmcore-engine whose distributions stay selected under `--plugins`, like built-ins."""

BUILTINS: Mapping[str, str] = {
    "balancers": "llmcore.builtin.balancers",
    "commands": "llmcore.builtin.commands",
    "devices": "llmcore.builtin.devices",
    "estimators": "llmcore.builtin.estimators",
    "fcfs": "llmcore.builtin.fcfs",
    "kernels_cpu": "llmcore.builtin.cpu",
    "layouts": "llmcore.builtin.layouts",
    "ops": "llmcore.builtin.ops",
    "priority": "llmcore.builtin.priority",
    "radix": "llmcore.builtin.radix",
    "safetensors": "llmcore.builtin.safetensors",
    "tokenizers": "llmcore.builtin.tokenizers",
}
"""Built-in plugin -> its hook module."""


@dataclass(frozen=True)
class Selection:
    """The plugins that take part, by name, and those that cannot because another plugin has the same name."""

    plugins: tuple[PluginInfo, ...]
    clashes: tuple[Failure, ...] = ()


def available() -> list[PluginInfo]:
    """Every plugin by name, built-in or installed. Imports none of them."""
    inside = [PluginInfo(name, CORE_DIST, __version__, module) for name, module in BUILTINS.items()]
    return sorted([*inside, *_installed()], key=lambda info: (info.name, info.dist))


def select(named: Sequence[str] | None) -> Selection:
    """The plugins that take part; `named` is the value of `--plugins`.

    If `named` selects plugins, these take part, with the built-ins and the plugins of the distributions that the
    EXTRAS require. Otherwise every installed plugin takes part. `-name` leaves one out, even a built-in. A path to a
    .py file is a plugin with the file's name.

    If two plugins have one name, neither takes part unless `dist:name` chooses one or `-dist:name` leaves one out. A
    built-in takes part unless `dist:name` or a file replaces it. Raises ConfigError for an unknown name.
    """
    candidates = available()
    chosen: dict[str, PluginInfo] = {}
    wanted: set[str] = set()
    for item in named or ():
        if item.startswith("-"):
            unwanted = _called(item[1:], candidates)
            candidates = [info for info in candidates if info not in unwanted]
            continue
        is_file = item.endswith(".py")
        meant = [_from_file(item)] if is_file else _called(item, candidates)
        if is_file or ":" in item:
            for info in meant:
                _choose(chosen, info)
        wanted.add(meant[0].name)
    by_name = {info.name: [other for other in candidates if other.name == info.name] for info in candidates}
    by_name |= {name: [info] for name, info in chosen.items()}
    always = {info.name for info in candidates if _stays(info)}
    selected = {*wanted, *always} & set(by_name) if wanted else set(by_name)
    taking_part, clashes = [], []
    for name in sorted(selected):
        alike = by_name[name]
        first = [info for info in alike if _stays(info)] or alike
        taken = first if len(first) == 1 else []
        taking_part += taken
        clashes += [_clash(info, alike, fatal=name in wanted) for info in alike if info not in taken]
    return Selection(tuple(taking_part), tuple(clashes))


def _choose(chosen: dict[str, PluginInfo], info: PluginInfo) -> None:
    other = chosen.setdefault(info.name, info)
    if other != info:
        raise ConfigError(
            f"--plugins names two plugins that are called {info.name!r}: {_origin(other)} and {_origin(info)}; "
            "give one of them"
        )


def _called(item: str, candidates: Sequence[PluginInfo]) -> list[PluginInfo]:
    """The candidates that a name or `dist:name` means, at least one. Raises ConfigError."""
    dist, colon, name = item.rpartition(":")
    found = [
        info for info in candidates if info.name == name and (not colon or _canonical(info.dist) == _canonical(dist))
    ]
    if not found:
        known = {f"{info.dist}:{info.name}" if colon else info.name for info in candidates}
        exist = ", ".join(sorted(known)) or "none"
        raise ConfigError(f"there is no plugin {item!r}; installed: {exist}.{did_you_mean(item, known)}")
    return found


def _clash(info: PluginInfo, alike: Sequence[PluginInfo], *, fatal: bool) -> Failure:
    """The reason why `info` does not take part. `alike`: all plugins with its name."""
    built_in = any(_stays(other) for other in alike)
    others = "the built-in plugin" if built_in else " and ".join(_origin(other) for other in alike if other != info)
    take = "to replace it" if built_in else "to choose this one"
    fix = f"{take}, give --plugins {info.dist}:{info.name}; to go without it, --plugins=-{info.dist}:{info.name}"
    return Failure(info, "discovery", f"{others} has this name too", fix, fatal)


def _stays(info: PluginInfo) -> bool:
    """True if a plugin takes part whatever `--plugins` selects, unless it is left out or replaced by name."""
    return info.dist == CORE_DIST or _canonical(info.dist) in extras()


@cache
def extras() -> Mapping[str, str]:
    """Distribution -> the extra in EXTRAS that requires it, from the metadata of llmcore-engine."""
    marker = re.compile(rf"([\w.-]+)[^;]*;.*extra == [\"']({'|'.join(EXTRAS)})[\"']")
    try:
        found = map(marker.match, requires(CORE_DIST) or ())
    except PackageNotFoundError:  # the sources are on the path and nothing is installed
        return {}
    return {_canonical(match[1]): match[2] for match in found if match}


def _canonical(dist: str) -> str:
    """The normalized name of a distribution (PEP 503)."""
    return re.sub(r"[-_.]+", "-", dist).lower()


def build_registry(config: Config) -> Registry:
    """The contributions of the config's plugins.

    Raises PluginError if a plugin that the user named failed, or if two clash. The process that discovers the plugins
    logs other failures, so its children do not log them again.
    """
    registry = collect(config)
    if fatal := [str(failure) for failure in registry.failures if failure.fatal]:
        raise PluginError("\n".join(fatal))
    if not config.discovered:
        for entry in (*registry.failures, *registry.declined):
            log.warning("%s", entry)
    return registry


def collect(config: Config) -> Registry:
    """As `build_registry`, but failures are only recorded, for commands that show them.

    A process whose config has no discovered plugins (the command line, LLM) discovers them itself.
    """
    named = config.plugins.plugins or ()
    order = [_name_of(item) for item in named if not item.startswith("-")]
    selection = Selection(config.discovered) if config.discovered else select(named)
    registry = Registry(selection.plugins, order)
    registry.failures += selection.clashes
    for info in selection.plugins:
        registry.add(info, import_plugin)
    return registry


def configure(plugins: Sequence[str] | None = None, **values: Any) -> tuple[Config, Registry]:
    """A checked Config from settings by name, and the contributions of its plugins, for use in this process.

    It reads neither the environment nor a file. Raises ConfigError for an unknown or wrong setting.
    """
    chosen = {} if plugins is None else {"plugins": list(plugins)}
    registry = build_registry(make_config(**chosen))
    brought = [spec for spec, _ in registry.specs(OptionSpec)]
    return replace(make_config(brought, **chosen, **values), discovered=registry.offered), registry


def _name_of(item: str) -> str:
    """The plugin's own name in an item of `--plugins`."""
    return Path(item).stem if item.endswith(".py") else item.rpartition(":")[2]


def import_plugin(info: PluginInfo) -> ModuleType:
    """Load a plugin: import its hook module."""
    if ":" in info.entry_point:
        raise PluginError(f"its entry point is {info.entry_point!r}; it has to name a module, without a colon")
    if not info.entry_point.endswith(".py"):
        return importlib.import_module(info.entry_point)
    # Import strings in the file's specs use its __name__, so it must stay importable under it.
    name = f"llmcore_file_{info.name}"
    if getattr(sys.modules.get(name), "__file__", None) == info.entry_point:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, info.entry_point)
    if spec is None or spec.loader is None:
        raise PluginError(f"{info.entry_point} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def load(target: ImportString) -> Any:
    """The object that an import string names. Raises PluginError that says which part is missing."""
    module_name, _, attribute = target.partition(":")
    if not module_name or not attribute:
        raise PluginError(f"{target!r} is no import string: it needs the form package.module:attribute")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise PluginError(f"cannot import {target!r}: {error}") from error
    try:
        return attrgetter(attribute)(module)
    except AttributeError as error:
        raise PluginError(f"cannot load {target!r}: {error}") from error


def made(registry: Registry, kind: type[Made], name: str, *arguments: Any) -> Any:
    """The result of `make` of the contribution called `name`. Raises PluginError with its plugin if `make` raises."""
    spec, plugin = registry.owned(kind, name)
    try:
        return load(spec.make)(*arguments)
    except BaseException as error:
        reraise_if_stopping(error)
        what = f"{KIND_NAMES[kind]} {name!r} of plugin {plugin.name!r} failed to start"
        text = message_of(error) if isinstance(error, PluginError) else text_of(error)
        raise PluginError(f"{what}: {text}; {fix_for(plugin, error)}") from error


def _installed() -> Iterator[PluginInfo]:
    """The plugins of the installed distributions, by their entry points.

    Of two distributions with one name, the first on the path counts. A distribution without readable metadata is
    skipped, with a warning.
    """
    seen: set[str] = set()
    for distribution in distributions():
        try:
            points = [point for point in distribution.entry_points if point.group == GROUP]
            if not points:
                continue
            dist, version = distribution.metadata["Name"], distribution.version
        except BaseException as error:  # noqa: BLE001 - other people's files, read by the standard library
            reraise_if_stopping(error)
            log.warning("the metadata of an installed distribution cannot be read: %s; repair it", text_of(error))
            continue
        key = _canonical(dist or "")
        if key not in seen:
            seen.add(key)
            yield from (PluginInfo(point.name, dist or "", version or "", point.value) for point in points)


def _origin(info: PluginInfo) -> str:
    return f"{info.dist} {info.version} ({info.entry_point})"


def _from_file(path: str) -> PluginInfo:
    file = Path(path).expanduser().resolve()
    if not file.is_file():
        raise ConfigError(f"there is no plugin file {path}")
    return PluginInfo(file.stem, file.name, "", str(file))
