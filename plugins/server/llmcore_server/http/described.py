"""The meaning of a struct's fields: the text that stands below each of them in the source."""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import pairwise
from typing import Any

import msgspec


def structs(kinds: Iterable[Any]) -> list[type[msgspec.Struct]]:
    """Every struct in `kinds`, and in their fields at any depth."""
    found: dict[type[msgspec.Struct], None] = {}
    for info in msgspec.inspect.multi_type_info(list(kinds)):
        _collect(info, found)
    return list(found)


def field_texts(kind: type[msgspec.Struct]) -> dict[str, str]:
    """The text below each field, by the field's name in JSON. The text of an inherited field stands in its own class.
    A field without a text is left out. If the source is missing, all fields are."""
    texts: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        if base is not msgspec.Struct and issubclass(base, msgspec.Struct):
            texts |= _written(base)
    encoded = dict(zip(kind.__struct_fields__, kind.__struct_encode_fields__, strict=True))
    return {encoded[name]: text for name, text in texts.items() if name in encoded}


def _collect(info: object, found: dict[type[msgspec.Struct], None]) -> None:
    """Add the structs of a type, as msgspec describes it, to `found`."""
    if isinstance(info, msgspec.inspect.StructType):
        if info.cls in found:
            return
        found[info.cls] = None
    for inner in _parts(info):
        _collect(inner, found)


def _parts(info: object) -> Iterator[object]:
    """The types that a type is made of."""
    if isinstance(info, msgspec.inspect.StructType):
        yield from (field.type for field in info.fields)
    for name in ("item_type", "key_type", "value_type", "type"):
        if isinstance(part := getattr(info, name, None), msgspec.inspect.Type):
            yield part
    for name in ("item_types", "types"):
        yield from getattr(info, name, ())


def _written(kind: type) -> dict[str, str]:
    """The texts in the body of one class."""
    return _classes(kind.__module__).get(kind.__name__, {})


@lru_cache(maxsize=64)
def _classes(module: str) -> dict[str, dict[str, str]]:
    """The texts in every class of a module, by the class's name."""
    try:
        tree = ast.parse(inspect.getsource(sys.modules[module]))
    except (KeyError, OSError, TypeError, SyntaxError):
        return {}
    return {node.name: dict(_texts(node.body)) for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}


def _texts(body: list[ast.stmt]) -> Iterator[tuple[str, str]]:
    for field, below in pairwise(body):
        if (
            isinstance(field, ast.AnnAssign)
            and isinstance(field.target, ast.Name)
            and isinstance(below, ast.Expr)
            and isinstance(below.value, ast.Constant)
            and isinstance(below.value.value, str)
        ):
            yield field.target.id, inspect.cleandoc(below.value.value)
