"""Type checks of a spec's fields, so that a wrong type fails its plugin and not the command that prints the spec."""

from __future__ import annotations

import collections.abc
import types
import typing
from collections.abc import Callable
from functools import cache
from typing import Any

from llmcore.api.specs import Spec

Check = Callable[[Any], bool]


def misfit(spec: Spec) -> str | None:
    """A phrase about the first field with a wrong type, or None."""
    for name, hint, fits in _fields(type(spec)):  # type: ignore[arg-type]  # classes can be hashed
        value = getattr(spec, name)
        if not fits(value):
            wanted = getattr(hint, "__name__", None) if isinstance(hint, type) else str(hint).replace("typing.", "")
            return f"{type(spec).__name__}.{name} is a {type(value).__name__}, needs {wanted}"
    return None


@cache
def _fields(kind: type[Spec]) -> list[tuple[str, Any, Check]]:
    """Each field's name, type hint and check."""
    hints = typing.get_type_hints(kind, localns={})  # the field OptionSpec.type would hide the class
    return [(name, hint, _check(hint)) for name, hint in hints.items()]


def _check(hint: Any) -> Check:
    """Returns a function that is true for values that fit a type hint."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return lambda value: value in arguments
    if origin is collections.abc.Callable:
        return callable
    each = [_check(argument) for argument in arguments if argument is not ...]
    if origin in (typing.Union, types.UnionType):
        return lambda value: any(fits(value) for fits in each)
    if origin is tuple and ... in arguments:
        return lambda value: isinstance(value, tuple) and all(map(each[0], value))
    if origin is tuple:
        return lambda value: (
            isinstance(value, tuple)
            and len(value) == len(each)
            and all(fits(one) for fits, one in zip(each, value, strict=True))
        )
    if origin is collections.abc.Mapping:
        return lambda value: (
            isinstance(value, collections.abc.Mapping)
            and all(map(each[0], value))
            and all(map(each[1], value.values()))
        )
    if hint is Any or not isinstance(hint, type):
        return lambda value: True
    return lambda value: isinstance(value, hint)
