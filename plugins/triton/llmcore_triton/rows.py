"""The part that the row-wise kernels share.

The grid's long axis has the tokens. The kernels `release` right after `wait`: the next kernel is often a matrix
product, which meanwhile loads its weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llmcore.api import OpContext

from llmcore_triton import tuned
from llmcore_triton.specs.rows import NAME

VECTOR = 16
"""Bytes that one thread loads at once."""

WARP = 32

ELEMENT: Mapping[str, int] = {"f32": 4, "f16": 2, "bf16": 2}
"""Bytes of an element."""


def size(context: OpContext, name: str) -> int:
    """Returns a whole number of the context's shape. The spec has checked that it is there."""
    value = context.shape[name]
    if not isinstance(value, int):
        raise TypeError(f"{context.op}: shape[{name!r}] is {value!r}, not a whole number")
    return value


def choose(context: OpContext, default: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the launch configuration: the one measured for this bucket, or `default` if all buckets must agree."""
    return dict(default) if context.deterministic else tuned.choose(NAME, context, default)


def small(context: OpContext) -> bool:
    """True if the time to start and to wait for memory exceeds the time to move the bytes. False if all buckets must
    agree."""
    return not context.deterministic and context.bucket <= 2


def power(number: int) -> int:
    """Returns the smallest power of two that is not below `number`."""
    return 1 << max(number - 1, 0).bit_length()


def warps(context: OpContext, elements: int, vectors: int) -> int:
    """The warps (1 to 16) such that each thread has `vectors` loads of `elements` elements. It is a power of two."""
    per_warp = WARP * vectors * VECTOR // ELEMENT[context.dtype]
    return min(max(elements // per_warp, 1), 16)
