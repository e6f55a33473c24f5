"""Compiled kernels, entered without what Triton's launcher does anew for every launch.

Triton asks the driver about each tensor's address, encodes each TMA descriptor again and walks through all arguments
to put it in. Here addresses are numbers, and a descriptor that is launched again (of weights) is encoded once.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import triton
from triton.backends.nvidia.driver import make_tensordesc_arg
from triton.tools.tensor_descriptor import TensorDescriptor

_KNOWN = "3.6."
"""The Triton whose launcher this enters; any other is called as it wants to be."""

_PARTS = ("launch", "launch_cooperative_grid", "launch_pdl", "global_scratch_size", "profile_scratch_size")

Launch = Callable[[tuple[int, ...], Sequence[Any], list[Any]], None]
"""((x, y, z, stream), arguments, the same with addresses in place of tensors, which it may change)."""


class Box(TensorDescriptor):  # type: ignore[misc]
    """What TMA reads boxes of, for makers that have checked alignment themselves: Triton checks it all again."""

    def __post_init__(self) -> None:
        """No checks."""


def launch_of(compiled: Any, boxes: tuple[int, ...], constants: tuple[Any, ...]) -> Launch:
    """How to launch a compiled kernel; `boxes`: which arguments are descriptors."""
    found = _entry(compiled.run, bool(boxes))
    run, function, packed = compiled.run, compiled.function, compiled.packed_metadata
    if found is None:

        def usual(where: tuple[int, ...], arguments: Sequence[Any], numbers: list[Any]) -> None:
            run(*where, function, packed, None, None, None, *arguments, *constants)

        return usual
    enter, encodings = found
    head = (function, run.launch_cooperative_grid, run.launch_pdl, None, None, packed, None, None, None)
    # from the last on: each descriptor takes more than one place
    described = tuple(zip(boxes, encodings, strict=True))[::-1]

    def direct(where: tuple[int, ...], arguments: Sequence[Any], numbers: list[Any]) -> None:
        for at, how in described:
            numbers[at : at + 1] = _encoded(numbers[at], how, enter)
        enter(*where, *head, *numbers, *constants)

    return direct


def _entry(run: Any, boxes: bool) -> tuple[Callable[..., None], Sequence[Any]] | None:
    """The function in C, and how it wants descriptors to be encoded; None where this is not the launcher we know."""
    if not triton.__version__.startswith(_KNOWN) or not all(hasattr(run, part) for part in _PARTS):
        return None
    if run.global_scratch_size or run.profile_scratch_size:
        return None
    if not boxes:
        return run.launch, ()
    within = inspect.getclosurevars(run.launch).nonlocals
    if "launcher" not in within or "tensordesc_meta" not in within:
        return None
    return within["launcher"], within["tensordesc_meta"]


def _encoded(box: TensorDescriptor, how: Any, kernel: object) -> list[Any]:
    """What `kernel` takes for a descriptor, which keeps it: what it describes does not change."""
    kept: dict[object, list[Any]] = vars(box).setdefault("encoded", {})
    found = kept.get(kernel)
    if found is None:
        found = kept[kernel] = make_tensordesc_arg(box, how)
    return found
