"""Type checks of a spec's fields, so that a wrong type fails its plugin and not the command that prints the spec."""

from __future__ import annotations

import collections.abc
import types
import typing
from functools import cache
from typing import Any

from llmcore.api.specs import Spec


def misfit(spec: Spec) -> str | None:
    """A phrase about the first field with a wrong type, or None."""
    for name, hint in _hints(type(spec)).items():  # type: ignore[arg-type]  # classes can be hashed
        value = getattr(spec, name)
        if not _fits(value, hint):
            wanted = getattr(hint, "__name__", None) if isinstance(hint, type) else str(hint).replace("typing.", "")
            return f"{type(spec).__name__}.{name} is a {type(value).__name__}, needs {wanted}"
    return None


@cache
def _hints(kind: type[Spec]) -> dict[str, Any]:
    return typing.get_type_hints(kind, localns={})  # the field OptionSpec.type would hide the class


def _fits(value: object, hint: Any) -> bool:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, one) for one in arguments)
    if origin is typing.Literal:
        return value in arguments
    if origin is tuple:
        several = arguments[:1] * len(value) if isinstance(value, tuple) and ... in arguments else arguments
        return isinstance(value, tuple) and len(value) == len(several) and all(map(_fits, value, several))
    if origin is collections.abc.Mapping:
        return isinstance(value, collections.abc.Mapping) and all(
            _fits(key, arguments[0]) and _fits(one, arguments[1]) for key, one in value.items()
        )
    if origin is collections.abc.Callable:
        return callable(value)
    return hint is Any or not isinstance(hint, type) or isinstance(value, hint)
