"""Plain values checked and made into structs, from any thread."""

from __future__ import annotations

import contextlib
import threading
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")

_known: set[Any] = set()
_learning = threading.Lock()


def convert(value: Any, kind: type[T]) -> T:
    """`msgspec.convert`: `value` as `kind`. Raises msgspec.ValidationError.

    msgspec looks a type over when it first meets it, and the process crashes if a second thread brings a value of that
    type meanwhile, as when the first requests of a server come all at once. So one thread at a time makes it known.
    """
    if kind not in _known:
        with _learning:
            with contextlib.suppress(msgspec.ValidationError):
                msgspec.convert(None, kind)
            _known.add(kind)
    return msgspec.convert(value, kind)
