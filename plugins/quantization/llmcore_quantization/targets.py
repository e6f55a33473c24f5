"""Which modules a quantization_config means, by name. The headers of a checkpoint confirm or refute it."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Mapping
from typing import Any

from llmcore.api import ConfigError

REGEX = "re:"
CLASSES = frozenset({"Linear", "torch.nn.Linear", "Module"})
"""Names of classes that every linear has."""


def in_layers(module: str) -> bool:
    """True for a module of a decoder layer, whose path has the layer's number, unlike the head's."""
    return any(part.isdecimal() for part in module.split("."))


def listed(module: str, patterns: Iterable[str]) -> bool:
    """True if a list such as `modules_to_not_convert`, `ignored_layers` or `exclude_modules` has the module.

    A pattern is a regular expression after "re:", a glob if it has "*", and else some whole components of the path:
    "gate" means "mlp.gate", and not "mlp.gate_proj".
    """
    return any(_lists(pattern, module) for pattern in patterns)


def _lists(pattern: str, module: str) -> bool:
    if pattern.startswith(REGEX):
        return matched(pattern.removeprefix(REGEX), module)
    if "*" in pattern:
        return fnmatch.fnmatchcase(module, pattern)
    return f".{pattern}." in f".{module}."


def targeted(module: str, targets: Iterable[str]) -> int:
    """How closely `targets` or `ignore` of compressed-tensors name the module.

    2: by its name or by a regular expression, 1: by its class, 0: not at all.
    """
    found = list(targets)
    if any(matched(t.removeprefix(REGEX), module) if t.startswith(REGEX) else t == module for t in found):
        return 2
    return 1 if CLASSES.intersection(found) else 0


def overridden(module: str, dynamic: Mapping[str, Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """The values that `dynamic` of GPTQ has for the module: {} if there are none, None if it stays plain.

    The first pattern that matches applies. A pattern after "-:" leaves modules plain.
    """
    for pattern, values in dynamic.items():
        if matched(re.sub(r"^[+-]:", "", pattern), module):
            return None if pattern.startswith("-:") else values
    return {}


def matched(pattern: str, module: str) -> bool:
    """True if the module's name begins as the regular expression says. Raises ConfigError for a broken expression."""
    try:
        return re.match(pattern, module) is not None
    except re.error as error:
        raise ConfigError(
            f"{pattern!r} in quantization_config is not a regular expression ({error}); correct it in config.json"
        ) from error


def names(quantization: Mapping[str, Any], *keys: str) -> tuple[str, ...]:
    """The first of the lists `keys` that `quantization` has; () without any. Raises ConfigError."""
    for key in keys:
        value = quantization.get(key)
        if value is None:
            continue
        if not isinstance(value, list | tuple) or not all(isinstance(name, str) for name in value):
            raise ConfigError(f"{key} in quantization_config is {value!r} and has to be a list of names")
        return tuple(value)
    return ()
