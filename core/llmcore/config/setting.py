"""One setting: what it is called, what it accepts, and how a value is read from text or YAML."""

from __future__ import annotations

import logging
import math
import re
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from functools import cache
from typing import Any

from llmcore.config import elsewhere
from llmcore.config.tree import Kernels, Memory, Model, Plugins, Reports, Requests, Scheduling
from llmcore.errors import ConfigError, did_you_mean
from llmcore.specs import OptionSpec

log = logging.getLogger("llmcore.config")

GROUPS: Mapping[str, type] = {
    "model": Model,
    "requests": Requests,
    "reports": Reports,
    "memory": Memory,
    "scheduling": Scheduling,
    "kernels": Kernels,
    "plugins": Plugins,
}

RETIRED: Mapping[str, str] = {
    "diverse_mode": "the answers of one request (n, best_of) always share the computation of their prompt",
    "use_dynamic_prompt_cache": "the prefix cache is always on; --disable_dynamic_prompt_cache turns it off",
    "enable_prefix_caching": "the prefix cache is always on; --disable_dynamic_prompt_cache turns it off",
    "splitfuse_mode": "chunked prefill is always on; --disable_chunked_prefill turns it off",
}
"""Flags of LightLLM and LMDeploy that switch on what is always on here; using one is a warning."""

_TRUE = {"true", "1", "yes", "on"}
_FALSE = {"false", "0", "no", "off"}
_WHOLE = re.compile(r"-?[0-9]+")
_DECIMAL = re.compile(r"-?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
"""Numbers as they are written everywhere: Python's own readers also take `1_0`, `nan` and the digits of any script."""
_SUFFIXES = {"k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}
MOST_QUOTED = 80
"""Characters of a wrong value that a message shows."""
HIDDEN = "(hidden)"
"""Stands for what is secret."""
_LOGIN = re.compile(r"^(?:[a-z]+://|)([^/\s]+)@")
"""The login in an address."""
_KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A leaf of the tree, or an option that a plugin brings.

    `group`: the section of the tree; for an option of a plugin the name of its `section`, else "plugin_options".
    `kind` is int, float, bool or str; a `multiple` setting is a tuple of it. `low` and `high` are inclusive. `unset`:
    a word that means the default. On the command line a `multiple` setting takes the words up to the next option,
    with `one_word` the next one only. Nothing shows the value of a `secret` one, or the user and the password in
    the address that a `login` one holds. `variables`: environment variables beside `LLMCORE_NAME` that set it, which
    counts more. `serving`: it has an effect on a server only.
    """

    name: str
    group: str
    kind: type
    help: str
    default: Any
    multiple: bool = False
    aliases: tuple[str, ...] = ()
    choices: tuple[str, ...] = ()
    unit: str | None = None
    low: float | None = None
    high: float | None = None
    first_page: bool = False
    unset: str | None = None
    one_word: bool = False
    secret: bool = False
    login: bool = False
    variables: tuple[str, ...] = ()
    section: type | None = None
    serving: bool = False

    def parse(self, raw: object, where: str) -> Any:
        """The value that `raw` (text, or what YAML made of it) stands for; a ConfigError names `where` it is from."""
        if self.secret and (raw is None or str(raw).strip(" ,") == ""):
            raise ConfigError(f"{where} holds nothing; give {self._wanted()}, or leave it out.")
        if raw is None:
            if self.default is None or self.multiple:
                return self.default
            raise ConfigError(f"{where} is empty: give {self._wanted()}, or leave it out.")
        if self.unset is not None and str(raw).strip() == self.unset:
            return self.default
        if not self.multiple:
            return self._one(raw, where)
        items = raw if isinstance(raw, (list, tuple)) else [raw]
        words = [word for item in items for word in (_split(item) if isinstance(item, str) else [item])]
        return tuple(self._one(word, where) for word in words)

    def _one(self, raw: object, where: str) -> Any:
        value = self._convert(raw, where)
        if self.choices and value not in self.choices:
            meant = next((choice for choice in self.choices if choice.lower() == str(value).lower()), None)
            if meant is not None:
                return meant  # as --log_level debug
            hint = did_you_mean(str(value), self.choices)
            hint = "" if self.secret else hint
            raise ConfigError(f"{where}: {self.quoted(value)} is not one of {', '.join(self.choices)}.{hint}")
        if not ((self.low is None or value >= self.low) and (self.high is None or value <= self.high)):
            raise ConfigError(f"{where}: {self.quoted(value)} is out of range; give {self._wanted()}.")
        return value

    def shown(self, value: Any) -> Any:
        """A value of this setting for people to see."""
        if self.secret and value:
            return HIDDEN
        return without_login(value, value) if self.login and isinstance(value, str) else value

    def quoted(self, raw: object) -> str:
        """A raw value, wrong or not, for a message."""
        if self.secret or (self.login and not isinstance(raw, str)):
            return "its value"
        if isinstance(raw, str) and "\n" in raw:
            return "its text of several lines"  # one of them may be meant as the line of a key
        text = repr(self.shown(raw))
        return text if len(text) <= MOST_QUOTED else f"{text[:MOST_QUOTED]}..."

    def _convert(self, raw: object, where: str) -> Any:
        wrong = ConfigError(f"{where}: {self.quoted(raw)} is not {_KINDS[self.kind]}; give {self._wanted()}.")
        text = raw.strip() if isinstance(raw, str) else raw
        if not isinstance(text, (bool, int, float, str)):
            raise wrong
        try:
            if isinstance(text, bool) or self.kind is bool:
                return _boolean(text, self.kind)
            if self.kind is str:
                return str(text)
            return _count(raw, self.unit) if self.kind is int else _number(raw)
        except (ValueError, OverflowError):
            raise wrong from None

    def _wanted(self) -> str:
        if self.choices:
            return f"one of {', '.join(self.choices)}"
        kind = _KINDS[self.kind] + (" (32k and 32K are understood)" if self.unit else "")
        match self.low, self.high:
            case None, None:
                return kind
            case low, None:
                return f"{kind}, at least {low}"
            case low, high:
                return f"{kind} from {low} to {high}"


def without_login(address: str, text: str) -> str:
    """`text` without the user and the password that `address` may hold."""
    found = _LOGIN.match(address)
    if found is None:
        return text
    password = found[1].partition(":")[2]
    text = text.replace(found[1], HIDDEN)
    return text.replace(password, HIDDEN) if password else text


def _split(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _boolean(raw: object, kind: type) -> bool:
    word = str(raw).lower()
    if kind is not bool or word not in _TRUE | _FALSE:
        raise ValueError(raw)
    return word in _TRUE


def _count(raw: Any, unit: str | None) -> int:
    if not isinstance(raw, str):
        return _whole(raw)
    if unit and raw[-1:] in _SUFFIXES:
        return _whole(_number(raw[:-1]) * _SUFFIXES[raw[-1]])
    if not _WHOLE.fullmatch(raw):
        raise ValueError(raw)
    return int(raw)


def _number(raw: Any) -> float:
    if isinstance(raw, str) and not _DECIMAL.fullmatch(raw):
        raise ValueError(raw)
    number = float(raw)
    if not math.isfinite(number):
        raise ValueError(raw)
    return number


def _whole(number: float) -> int:
    if number != int(number):
        raise ValueError(number)
    return int(number)


@cache
def settings() -> tuple[Setting, ...]:
    """Every setting of core, in the order of the tree."""
    return tuple(
        Setting(name=leaf.name, group=group, default=leaf.default, **_shape(hints[leaf.name]), **leaf.metadata)
        for group, section in GROUPS.items()
        for hints in [typing.get_type_hints(section)]
        for leaf in fields(section)
    )


def options_of(section: type[Any], *, serving: bool = False) -> Iterator[OptionSpec]:
    """The fields of a frozen dataclass as options that a plugin brings, for `register_options`.

    Its fields are made with `option`, its docstring is their heading, and `config.section(section)` gives its values.
    A method `check(config, origins)` of it raises ConfigError for values that contradict each other and yields
    warnings. `serving`: the options have an effect on a server only, so `LLM` refuses them.
    """
    hints = typing.get_type_hints(section)
    for leaf in fields(section):
        shape = _shape(hints[leaf.name])
        more = {name: value for name, value in leaf.metadata.items() if name != "help"}
        yield OptionSpec(
            name=leaf.name,
            summary=leaf.metadata["help"],
            type=shape["kind"],
            multiple=shape["multiple"],
            default=leaf.default,
            section=section,
            serving=serving,
            **more,
        )


def _shape(hint: Any) -> dict[str, Any]:
    if isinstance(hint, types.UnionType):
        hint = next(part for part in typing.get_args(hint) if part is not type(None))
    if typing.get_origin(hint) is tuple:
        return {"kind": typing.get_args(hint)[0], "multiple": True}
    return {"kind": hint, "multiple": False}


_SAME = {leaf.name for leaf in fields(Setting)} & {leaf.name for leaf in fields(OptionSpec)} - {"name", "default"}
"""What a Setting has of an OptionSpec as it is."""


def plugin_settings(specs: Iterable[OptionSpec]) -> tuple[Setting, ...]:
    """The options that plugins bring; a name that core or another plugin has is a ConfigError."""
    taken = set(names(settings()))
    found: list[Setting] = []
    for spec in specs:
        name = canonical(spec.name)
        if spec.type not in _KINDS:
            raise ConfigError(f"Option {name} of a plugin has type {spec.type.__name__}; use int, float, bool or str.")
        for one in (name, *spec.aliases):
            if one in taken:
                raise ConfigError(f"Option {one} exists already; the plugin that brings it must rename it.")
            taken.add(one)
        found.append(
            Setting(
                name=name,
                group="plugin_options" if spec.section is None else spec.section.__name__.lower(),
                kind=spec.type,
                help=spec.summary,
                default=tuple(spec.default or ()) if spec.multiple else spec.default,
                **{same: getattr(spec, same) for same in _SAME},
            )
        )
    return tuple(found)


ELSEWHERE = "elsewhere"
"""The group of options that are no settings (`config.elsewhere`); no Config holds them."""


@dataclass(frozen=True, kw_only=True)
class Absent(Setting):
    """An option of `config.elsewhere`."""

    option: elsewhere.Elsewhere

    def parse(self, raw: object, where: str) -> None:
        """Nothing, with a warning or none. Raises ConfigError for a value that asks for what there is not."""
        items = raw if isinstance(raw, (list, tuple)) else [raw]
        for item in items:
            text = str(item).strip()
            if text in self.option.accepts or (self.kind is bool and text.lower() in _FALSE):
                continue
            idle = self.option.idle.get(text, self.option.idle.get(None))
            if idle is None:
                given = where if self.kind is bool or "\n" in text else f"{where} {without_login(text, text)}"
                raise ConfigError(f"{given} is not available in this version: {self.option.why}.")
            log.warning("%s has no effect: %s.", where if None in self.option.idle else f"{where} {text}", idle)


def absent_settings(among: Iterable[Setting]) -> tuple[Absent, ...]:
    """What is not in `among` of the options that other servers have."""
    taken = names(among)
    return tuple(
        Absent(
            name=option.name,
            group=ELSEWHERE,
            kind=bool if option.flag else str,
            help=f"Not available in this version: {option.why}.",
            default=None,
            multiple=option.multiple,
            option=option,
        )
        for option in elsewhere.OPTIONS
        if option.name not in taken
    )


def names(among: Iterable[Setting]) -> dict[str, Setting]:
    """Setting by its name and by each alias."""
    return {name: setting for setting in among for name in (setting.name, *setting.aliases)}


def canonical(name: str) -> str:
    """`--Server-Port` and `SERVER_PORT` as the tree spells them: `server_port`."""
    return name.strip().lstrip("-").replace("-", "_").lower()


def find_setting(name: str, among: Iterable[Setting]) -> Setting:
    """The setting called `name` in any spelling or by an alias; ConfigError with the nearest names otherwise."""
    known = names(among)
    found = known.get(canonical(name))
    if found is None:
        raise ConfigError(f"there is no setting {name!r}.{did_you_mean(canonical(name), known)}")
    return found
