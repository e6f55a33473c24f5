"""Decoding of plain values into structs, from any thread."""

from __future__ import annotations

import contextlib
import threading
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")

_known: set[Any] = set()
_learning = threading.Lock()


def convert(value: Any, kind: type[T]) -> T:
    """`value` as `kind`, by `msgspec.convert`. Raises msgspec.ValidationError.

    msgspec inspects a type at its first use. The process crashes if a second thread converts to that type meanwhile,
    for instance when a server's first requests come all at once. So one thread at a time shows msgspec a new type.
    """
    if kind not in _known:
        with _learning:
            with contextlib.suppress(msgspec.ValidationError):
                msgspec.convert(None, kind)
            _known.add(kind)
    return msgspec.convert(value, kind)
