"""The kernels for mixtures of experts, one per op. Each takes any number of tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from llmcore.api import KernelSpec, OpContext

from llmcore_triton import tuned
from llmcore_triton.specs.common import GPU

NAME = "triton"
"""The name of every kernel here. There is one per op."""

MOST_EXPERTS = 256
"""Columns that one program can select from."""

_KERNELS: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("route", ("experts", "top_k", "size"), "one launch, the inputs of few tokens split over programs"),
    ("dispatch", ("experts", "top_k"), "one launch, a program per expert"),
    ("experts", ("experts", "top_k", "size", "inner"), "two launches over tiles of each expert's tokens"),
    ("combine", ("top_k", "size"), "blocks of columns"),
)
"""Op, the sizes that a kernel is made for, and a short description."""


def kernels() -> Iterable[KernelSpec]:
    """One kernel per op."""
    for op, sizes, summary in _KERNELS:
        yield KernelSpec(
            op=f"moe.{op}",
            name=NAME,
            make=f"llmcore_triton.moe.{op}:make",
            when=GPU,
            refuses=_made_for(sizes),
            cost=f"{__name__}:microseconds",
            batch_invariant=True,
            summary=summary,
        )
    yield KernelSpec(
        op="moe.fused",
        name=NAME,
        make="llmcore_triton.moe.fused:make",
        when=replace(GPU, buckets=frozenset({0, 1})),
        refuses=_made_for(("experts", "top_k", "size", "inner")),
        cost=f"{__name__}:microseconds",
        summary="three launches for one token, four for up to 16, nothing sorted",
    )


def microseconds(context: OpContext) -> float | None:
    """Returns the measured microseconds, or None."""
    return tuned.microseconds(NAME, context)


def _made_for(sizes: tuple[str, ...]) -> Callable[[OpContext], str | None]:
    def refuses(context: OpContext) -> str | None:
        missing = [name for name in sizes if not isinstance(context.shape.get(name), int)]
        if missing:
            return f"needs to know {', '.join(missing)}"
        return _no_route(context) if "experts" in sizes else None

    return refuses


def _no_route(context: OpContext) -> str | None:
    """Returns why these kernels do not support a route, or None."""
    shape = context.shape
    experts, top_k = int(shape.get("experts") or 1), int(shape.get("top_k") or 1)
    groups, kept = int(shape.get("groups") or 1), int(shape.get("top_groups") or 1)
    if experts > MOST_EXPERTS:
        return f"is for up to {MOST_EXPERTS} experts, not {experts}"
    if groups == 1:
        return None
    if experts % groups:
        return f"needs groups of one size, not {experts} experts in {groups}"
    if kept > groups or kept * (experts // groups) < top_k:
        return f"needs {top_k} experts in {kept} of {groups} groups"
    if shape.get("group_score") == "top2" and experts == groups:
        return "needs two experts in a group to add their scores"
    return None
