"""What the row-wise kernels have in common.

Their grids have the tokens along the axis that may be long. They `release` right after `wait`: the next kernel is
often a matrix product, which reads its weights meanwhile.
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
    """A whole number of the context's shape, which the spec has checked to be there."""
    value = context.shape[name]
    if not isinstance(value, int):
        raise TypeError(f"{context.op}: shape[{name!r}] is {value!r}, not a whole number")
    return value


def choose(context: OpContext, default: Mapping[str, Any]) -> dict[str, Any]:
    """The launch configuration: what was measured for this bucket, or `default` where all buckets must agree."""
    return dict(default) if context.deterministic else tuned.choose(NAME, context, default)


def small(context: OpContext) -> bool:
    """Whether the time to start and to wait for memory counts more than the bytes. Never where all buckets agree."""
    return not context.deterministic and context.bucket <= 2


def power(number: int) -> int:
    """The smallest power of two that is not below `number`."""
    return 1 << max(number - 1, 0).bit_length()


def warps(context: OpContext, elements: int, vectors: int) -> int:
    """Warps (1 to 16) in which every thread has `vectors` loads of `elements` elements, a power of two."""
    per_warp = WARP * vectors * VECTOR // ELEMENT[context.dtype]
    return min(max(elements // per_warp, 1), 16)
