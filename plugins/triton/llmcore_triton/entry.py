"""Enters compiled kernels without the work that Triton's launcher repeats for every launch.

Triton asks the driver about each tensor's address, encodes each TMA descriptor again, and walks through all arguments
to insert it. Here addresses are numbers, and a descriptor that is launched again (a weight's) is encoded only once.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import triton
from triton.backends.nvidia.driver import make_tensordesc_arg
from triton.tools.tensor_descriptor import TensorDescriptor

_KNOWN = "3.6."
"""The version of Triton whose launcher this code enters. Any other version is called through its public launcher."""

_PARTS = ("launch", "launch_cooperative_grid", "launch_pdl", "global_scratch_size", "profile_scratch_size")

Launch = Callable[[tuple[int, ...], Sequence[Any], list[Any]], None]
"""((x, y, z, stream), arguments, the same with addresses in place of tensors). The function may change the last
list."""


class Box(TensorDescriptor):  # type: ignore[misc]
    """A TMA descriptor whose maker has checked alignment already. Triton's own class checks it again."""

    def __post_init__(self) -> None:
        """Checks nothing."""


def launch_of(compiled: Any, boxes: tuple[int, ...], constants: tuple[Any, ...]) -> Launch:
    """Returns a function that launches a compiled kernel. `boxes`: places of the arguments that are descriptors."""
    found = _entry(compiled.run, bool(boxes))
    run, function, packed = compiled.run, compiled.function, compiled.packed_metadata
    if found is None:

        def usual(where: tuple[int, ...], arguments: Sequence[Any], numbers: list[Any]) -> None:
            run(*where, function, packed, None, None, None, *arguments, *constants)

        return usual
    enter, encodings = found
    head = (function, run.launch_cooperative_grid, run.launch_pdl, None, None, packed, None, None, None)
    # in reverse order: each descriptor is replaced by more than one argument
    described = tuple(zip(boxes, encodings, strict=True))[::-1]

    def direct(where: tuple[int, ...], arguments: Sequence[Any], numbers: list[Any]) -> None:
        for at, how in described:
            numbers[at : at + 1] = _encoded(numbers[at], how, enter)
        enter(*where, *head, *numbers, *constants)

    return direct


def _entry(run: Any, boxes: bool) -> tuple[Callable[..., None], Sequence[Any]] | None:
    """The C function, and how it wants descriptors to be encoded. None: this is not the launcher that we know."""
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
    """Returns the arguments by which `kernel` takes a descriptor. The box keeps them, since it never changes."""
    kept: dict[object, list[Any]] = vars(box).setdefault("encoded", {})
    found = kept.get(kernel)
    if found is None:
        found = kept[kernel] = make_tensordesc_arg(box, how)
    return found
