"""Sources of values: the command line beats the environment, which beats the YAML file, which beats defaults."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from llmcore.api.errors import ConfigError, did_you_mean
from llmcore.api.specs import OptionSpec
from llmcore.config.check import Origins, check_config
from llmcore.config.foreign import FOREIGN, absent_settings, foreign
from llmcore.config.setting import (
    FALSE,
    GROUPS,
    HIDDEN,
    RETIRED,
    Setting,
    canonical,
    names,
    settings,
)
from llmcore.config.tree import Config
from llmcore.config.yaml_file import YamlSettings

log = logging.getLogger("llmcore.config")

PREFIX = "LLMCORE_"
_NOT_SETTINGS = {"config", "debug"}
_NAME = re.compile(r"[A-Za-z_-]+")
_ALL = "`llmcore serve --help-all` lists all."


def environment(known: Iterable[Setting] = ()) -> dict[str, str]:
    """The variables of this process that are settings, by their full names.

    These are `LLMCORE_*` and the `variables` of `known` settings. `LLMCORE_*` wins over these.
    """
    ours = {name: value for name, value in os.environ.items() if name.startswith(PREFIX)}
    theirs = {
        variable: os.environ[variable]
        for setting in known
        for variable in setting.variables
        if variable in os.environ and PREFIX + setting.name.upper() not in ours
    }
    return ours | theirs


def hide_private(known: Iterable[Setting]) -> None:
    """Remove the variables of private settings from this process, so that no process that it starts gets them.

    For llmcore's own processes, after they have read the variables.
    """
    for setting in known:
        for variable in (PREFIX + setting.name.upper(), *setting.variables):
            if setting.private:
                os.environ.pop(variable, None)


def without_private(config: Config, known: Iterable[Setting]) -> Config:
    """`config` for another process: private settings have their defaults."""
    hidden = {setting.name: setting.default for setting in known if setting.private}
    return replace(config, plugin_options={**config.plugin_options, **hidden})


def gateway_login() -> tuple[str, str] | None:
    """(user, password) for `--metric_gateway`, from the variables that LightLLM reads; None if one is missing."""
    user, password = os.environ.get("USERNAME"), os.environ.get("PASSWORD")
    return None if user is None or password is None else (user, password)


SPIN_COUNT = "10000"
"""As fast as libgomp's default of 300,000 on an idle machine, and it rarely delays other processes."""


def child_environment(*, thread_caches: bool = True) -> dict[str, str]:
    """This process's environment for a child.

    OpenMP's threads spin while they wait for each other. Unless the operator set this, they spin only briefly. If
    another process needs the core, a long spin makes every step wait for whole time slices of that process.

    glibc's malloc gives each thread an arena, and other threads cannot use the memory that is free in it. With sixteen
    threads the process grows for the first hundred thousand requests. With one arena, memory stays nearly constant
    after some thousand requests. Nothing is slower, because Python's threads take turns.

    Without `thread_caches`, malloc's threads do not cache freed memory. Two dozen threads need a hundred thousand
    requests to fill their caches, with up to 240 KB each. HTTP workers run without caches; the engine keeps them,
    because they make its calls of many small kernels faster.

    tokenizers would start a thread per core for batches. Here every text is tokenized in the thread that needs it.
    """
    given, ours = dict(os.environ), {"TOKENIZERS_PARALLELISM": "false"}
    if "OMP_WAIT_POLICY" not in given:
        ours["GOMP_SPINCOUNT"] = SPIN_COUNT
    tunables = given.get("GLIBC_TUNABLES", "")
    if "glibc.malloc.arena_max" not in tunables:
        ours["MALLOC_ARENA_MAX"] = "1"
    if not thread_caches and "glibc.malloc.tcache_count" not in tunables:
        given["GLIBC_TUNABLES"] = f"{tunables}:glibc.malloc.tcache_count=0".removeprefix(":")
    return ours | given


def preset(variables: Mapping[str, str]) -> None:
    """Set variables that a library of this process reads later. One that is set already stays as it is."""
    for name, value in variables.items():
        os.environ.setdefault(name, value)


def debug_requested() -> bool:
    """True if `LLMCORE_DEBUG` asks for tracebacks."""
    return os.environ.get(f"{PREFIX}DEBUG", "").lower() not in {"", *FALSE}


def resolve_config(
    cli: Mapping[str, Any],
    env: Mapping[str, str],
    yaml: Mapping[str, Any],
    *,
    extra: Iterable[OptionSpec] = (),
    yaml_name: str = "the file",
) -> tuple[Config, Origins]:
    """The checked settings, and the origin of each value.

    `cli`: option name (with or without dashes) -> text. `env`: full variable name -> text. `yaml`: name -> value.
    `extra`: the options that plugins bring. Raises ConfigError for a setting that is unknown, out of range or
    contradictory. Logs a warning for a setting without effect.
    """
    present = settings(extra)
    known = names((*present, *absent_settings(present)))
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    sources: tuple[_Given, ...] = (
        _from_file(yaml, yaml_name, known),
        _from_environment(env, known),
        ((name, raw, f"--{name.lstrip('-')}") for name, raw in cli.items()),
    )
    for source in sources:
        for setting, raw, where in _collect(source, known):
            values[setting.name] = setting.parse(raw, where)
            origins[setting.name] = where
    if "dp" in values and "tp" not in values:  # each engine has one process
        values["tp"], origins["tp"] = values["dp"], origins["dp"]
    config = _build(values, present)
    complete = {setting.name: origins.get(setting.name, "default") for setting in present}
    sections = dict.fromkeys(s.section for s in present if s.section is not None and s.group not in GROUPS)
    for warning in check_config(config, complete, sections):
        log.warning("%s", warning)
    return config, complete


def make_config(extra: Iterable[OptionSpec] = (), /, **values: Any) -> Config:
    """A checked Config for use in this process, from settings by name. It reads neither the environment nor a file.

    `extra`: the options that plugins bring.
    """
    return resolve_config(values, {}, {}, extra=extra)[0]


_Given = Iterable[tuple[str, Any, str]]
_Known = Mapping[str, Setting]


def _collect(given: _Given, known: _Known) -> Iterable[tuple[Setting, Any, str]]:
    """(setting, raw, where) of each (name, raw, where). Raises ConfigError for unknown names and repeated settings."""
    found: dict[str, tuple[Setting, Any, str]] = {}
    for name, raw, where in given:
        if canonical(name) in RETIRED:
            log.warning("%s has no effect: %s.", where, RETIRED[canonical(name)])
            continue
        setting = known.get(canonical(name))
        if setting is None:
            if told := foreign(canonical(name)):
                raise ConfigError(f"{where} {told}")
            hint = did_you_mean(canonical(name), known)
            raise ConfigError(f"{where}: there is no setting {name!r}.{hint} {_ALL}")
        if setting.name in found:
            raise ConfigError(f"{found[setting.name][2]} and {where} are the same setting; give one of them.")
        found[setting.name] = (setting, raw, where)
    return found.values()


def _understood(name: str, known: _Known) -> bool:
    """True for the names that `_collect` knows: settings, retired flags and options of other servers."""
    return name in known or name in RETIRED or name in FOREIGN


def _from_file(given: Mapping[str, Any], file: str, known: _Known) -> Iterator[tuple[str, Any, str]]:
    """The settings of the file. Raises ConfigError for an unknown name.

    An unknown name may be a value in the wrong place, even an API key. So the error shows it only if it looks like the
    name of a setting; otherwise it shows the line number.
    """
    for name, raw in given.items():
        if _understood(canonical(name), known):
            yield name, raw, f"{name} in {file}"
            continue
        guess = did_you_mean(canonical(name), known)
        if guess and _NAME.fullmatch(name):
            raise ConfigError(f"{name} in {file}: there is no setting {name!r}.{guess} {_ALL}")
        line = f"line {given.lines[name]} of {file}" if isinstance(given, YamlSettings) else file
        raise ConfigError(f"{line}: the word before the colon is not the name of a setting.{guess} {_ALL}")


def _from_environment(env: Mapping[str, str], known: _Known) -> Iterator[tuple[str, Any, str]]:
    named = {variable: setting.name for setting in known.values() for variable in setting.variables}
    for variable, raw in env.items():
        name = named.get(variable) or canonical(variable.removeprefix(PREFIX))
        if name in _NOT_SETTINGS:
            continue
        if not _understood(name, known):
            # Not an error: Kubernetes writes variables like LLMCORE_SERVICE_HOST for a service of that name.
            log.warning("%s is not a setting and has no effect.%s", variable, did_you_mean(name, known))
        elif name == "port" and raw.startswith("tcp://"):
            raise ConfigError(
                f"{variable}={raw} was written by Kubernetes for a service called llmcore; "
                "set enableServiceLinks: false in the pod, or rename the service."
            )
        else:
            yield name, raw, variable


def _build(values: Mapping[str, Any], present: Sequence[Setting]) -> Config:
    sections = {
        group: section(**{s.name: values[s.name] for s in present if s.group == group and s.name in values})
        for group, section in GROUPS.items()
    }
    brought = {s.name: values.get(s.name, s.default) for s in present if s.group not in GROUPS}
    return Config(**sections, plugin_options=brought)


def value_of(config: Config, setting: Setting) -> Any:
    """A setting's value in a config."""
    section = getattr(config, setting.group) if setting.group in GROUPS else None
    return config.plugin_options[setting.name] if section is None else getattr(section, setting.name)


def shown_settings(config: Config, known: Iterable[Setting]) -> dict[str, Any]:
    """The `known` settings by name.

    Other settings of plugins appear without their values, because a config does not say which of them are secret.
    """
    held = (s for s in known if s.group in GROUPS or s.name in config.plugin_options)
    return dict.fromkeys(config.plugin_options, HIDDEN) | {s.name: s.shown(value_of(config, s)) for s in held}
