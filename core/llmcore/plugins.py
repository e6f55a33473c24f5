"""The loader: which plugins take part, found once, filtered before import, and handed on as data.

Built-ins come the same way as anybody's plugins: they are named in a list here and imported by nobody.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

from llmcore import __version__
from llmcore.config import Config
from llmcore.errors import ConfigError, PluginError, did_you_mean, reraise_if_stopping
from llmcore.registry import KIND_NAMES, Registry, fix_for
from llmcore.specs import ImportString, KVManagerSpec, LengthEstimatorSpec, PluginInfo, SchedulerSpec

Made = KVManagerSpec | LengthEstimatorSpec | SchedulerSpec

GROUP = "llmcore"
"""Entry-point group of plugins."""

CORE_DIST = "llmcore-engine"

BUILTINS: Mapping[str, str] = {
    "devices": "llmcore.builtin.devices",
    "estimators": "llmcore.builtin.estimators",
    "fake-model": "llmcore.testing.plugin",
    "fcfs": "llmcore.builtin.fcfs",
    "fp8_block": "llmcore.builtin.fp8_block",
    "kernels_cpu": "llmcore.builtin.kernels_cpu",
    "layouts": "llmcore.builtin.layouts",
    "lightllm": "llmcore.builtin.lightllm",
    "openai": "llmcore.builtin.openai",
    "ops": "llmcore.builtin.ops",
    "priority": "llmcore.builtin.priority",
    "prometheus": "llmcore.builtin.prometheus",
    "radix": "llmcore.builtin.radix",
    "safetensors": "llmcore.builtin.safetensors",
    "status": "llmcore.builtin.status",
    "tgi": "llmcore.builtin.tgi",
    "tokenizers": "llmcore.builtin.tokenizers",
}
"""Plugin name -> hook module of what ships inside."""


def available() -> list[PluginInfo]:
    """Every plugin there is, by name: what ships inside and what is installed. Imports none of it.

    An installed plugin with a built-in's name stands in for it. Raises PluginError where two installed ones share
    a name.
    """
    found = {name: PluginInfo(name, CORE_DIST, __version__, module) for name, module in BUILTINS.items()}
    installed: dict[str, EntryPoint] = {}
    for point in entry_points(group=GROUP):
        other = installed.setdefault(point.name, point)
        if other is not point:
            raise PluginError(
                f"two plugins are called {point.name!r}: {_origin(other)} and {_origin(point)}; uninstall one"
            )
        found[point.name] = _info(point)
    return [found[name] for name in sorted(found)]


def discover(named: Sequence[str] | None) -> tuple[PluginInfo, ...]:
    """The plugins that take part, by name; `named` is what the user gave to `--plugins`.

    Names select: those plugins and the built-ins. `-name` leaves one out, built-ins included. A path to a .py file
    is a plugin too, called like the file. Without a selecting name everything installed takes part.
    """
    by_name = {info.name: info for info in available()}
    wanted, unwanted = [], set()
    for item in named or ():
        if item.endswith(".py"):
            by_name[Path(item).stem] = _from_file(item)
            wanted.append(Path(item).stem)
        elif item.startswith("-"):
            unwanted.add(item[1:])
        else:
            wanted.append(item)
    for name in (*wanted, *sorted(unwanted)):
        if name not in by_name:
            exist = ", ".join(sorted(by_name)) or "none"
            raise ConfigError(f"there is no plugin {name!r}; installed: {exist}.{did_you_mean(name, by_name)}")
    selected = {*wanted, *BUILTINS} if wanted else set(by_name)
    return tuple(by_name[name] for name in sorted(selected - unwanted))


def build_registry(config: Config) -> Registry:
    """What the config's plugins contribute. Raises PluginError if one failed that the user named, or two clash.

    Other failures are logged by the process that discovers, once for all those it hands the list to.
    """
    registry = collect(config)
    registry.check()
    if not config.discovered:
        registry.warn()
    return registry


def collect(config: Config) -> Registry:
    """As `build_registry`, but failures are only recorded: for commands that show them.

    A process that was handed no list (the command line, LLM) discovers for itself.
    """
    named = config.plugins.plugins or ()
    order = [Path(item).stem if item.endswith(".py") else item for item in named if not item.startswith("-")]
    plugins = config.discovered or discover(named)
    registry = Registry(plugins, order)
    for info in plugins:
        registry.add(info, import_plugin)
    return registry


def import_plugin(info: PluginInfo) -> ModuleType:
    """The plugin's hook module."""
    if not info.entry_point.endswith(".py"):
        return importlib.import_module(info.entry_point)
    # Import strings in the file's specs use its __name__, so it must stay importable under it.
    name = f"llmcore_file_{info.name}"
    if getattr(sys.modules.get(name), "__file__", None) == info.entry_point:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, info.entry_point)
    if spec is None or spec.loader is None:
        raise PluginError(f"{info.entry_point} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def load(target: ImportString) -> Any:
    """What an import string names. Raises PluginError that says which part is missing."""
    module_name, _, attribute = target.partition(":")
    if not module_name or not attribute:
        raise PluginError(f"{target!r} is no import string: it needs the form package.module:attribute")
    try:
        value: Any = importlib.import_module(module_name)
    except ImportError as error:
        raise PluginError(f"cannot import {target!r}: {error}") from error
    for part in attribute.split("."):
        if not hasattr(value, part):
            raise PluginError(f"cannot load {target!r}: {value!r} has no attribute {part!r}")
        value = getattr(value, part)
    return value


def made(registry: Registry, kind: type[Made], name: str, *arguments: Any) -> Any:
    """What the `make` of the contribution called `name` makes. PluginError with its plugin if that raises."""
    spec = registry.find(kind, name)
    plugin = next(plugin for other, plugin in registry.specs(kind) if other is spec)
    try:
        return load(spec.make)(*arguments)
    except BaseException as error:
        reraise_if_stopping(error)
        what = f"{KIND_NAMES[kind]} {name!r} of plugin {plugin.name!r} failed to start"
        text = str(error) if isinstance(error, PluginError) else f"{type(error).__name__}: {error}"
        raise PluginError(f"{what}: {text}; {fix_for(plugin, error)}") from error


def _info(point: EntryPoint) -> PluginInfo:
    dist = point.dist
    return PluginInfo(point.name, dist.name if dist else "", dist.version if dist else "", point.value)


def _origin(point: EntryPoint) -> str:
    info = _info(point)
    return f"{info.dist} {info.version} ({info.entry_point})"


def _from_file(path: str) -> PluginInfo:
    file = Path(path).expanduser().resolve()
    if not file.is_file():
        raise ConfigError(f"there is no plugin file {path}")
    return PluginInfo(file.stem, file.name, "", str(file))
