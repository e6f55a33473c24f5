"""The ops with one kernel each, and sampling with one per variant: row-wise ops, mixtures of experts.

A row's result depends on that row alone, and every bucket computes it in the same order, except in moe.fused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from llmcore.api import KernelSpec, OpContext

from llmcore_triton.specs import COST, GPU
from llmcore_triton.specs.layouts import QUANTIZED, TOKEN, no_fp8

NAME = "triton"
"""The name of every kernel here. There is one per op."""

LONGEST = 32768
"""Elements of a row that fit into the registers of one program."""

MOST_EXPERTS = 256
"""Columns that one program can select from."""

_HEADS = ("heads", "size", "rotated")

EXPERTS = ("experts", "top_k", "size", "inner")
"""The sizes that kernels for mixtures are made for."""

_KERNELS: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("embedding", ("size",), "rows copied in blocks"),
    ("rms_norm", ("size",), "one program per row"),
    ("add_rms_norm", ("size",), "one program per row, in place"),
    ("layer_norm", ("size",), "one program per row"),
    ("add_layer_norm", ("size",), "one program per row, in place"),
    ("silu_and_mul", ("size",), "rounds once"),
    ("gelu_and_mul", ("size",), "rounds once"),
    ("gelu_tanh", ("size",), "rounds once"),
    ("rope", _HEADS, "blocks of heads"),
    ("rope_kv_write", (*_HEADS, "kv_heads"), "one pass, queries and keys in place"),
    ("qk_norm_rope_kv_write", (*_HEADS, "kv_heads"), "one pass, queries and keys in place"),
    ("rope_angles", ("rotated",), "sine and cosine exact at far positions"),
    ("kv_slots", (), "one launch"),
    ("step_inputs", (), "one launch"),
    ("step_outputs", (), "one launch"),
    ("sample.best", (), "the best of chunks, then of the part"),
    ("sample.part", (), "a block by its mass, then a token in it"),
    ("sample.pick", (), "one program per row"),
    ("moe.route", ("experts", "top_k", "size"), "products whose inputs may be split, then a program per token"),
    ("moe.dispatch", ("experts", "top_k"), "one launch, a program per expert"),
    ("moe.experts", EXPERTS, "two launches over tiles of each expert's tokens"),
    ("moe.combine", ("top_k", "size"), "blocks of columns"),
    ("moe.fused", EXPERTS, "four launches for one token, five for up to 16, nothing sorted"),
)
"""Op, the sizes that its kernel is made for, and a short description."""

_VARIANTS = {
    "greedy": "the best of chunks, then of the row",
    "temperature": "a block by its mass, then a token in it",
    "filtered": "thresholds by bisection, nothing sorted",
    "full": "penalties by counting, and log-probabilities",
}
"""Variant of sampling, named after the most that a step's rows need -> how its kernel works."""


def kernels() -> Iterable[KernelSpec]:
    """One kernel per op, and of `sample` one per variant."""
    for op, sizes, summary in _KERNELS:
        fused = op == "moe.fused"
        yield KernelSpec(
            op=op,
            name=NAME,
            make=f"llmcore_triton.{op}:make",
            when=replace(
                GPU,
                layouts=frozenset({TOKEN, *QUANTIZED} if "kv_heads" in sizes else ()),
                buckets=frozenset({0, 1} if fused else ()),
            ),
            refuses=made_for(sizes, normed=op.endswith("_norm")),
            cost=COST,
            batch_invariant=not fused,
            summary=summary,
        )
    for variant, summary in _VARIANTS.items():
        yield KernelSpec(
            op="sample",
            name=f"triton_{variant}",
            make=f"llmcore_triton.sample.{variant}:make",
            when=replace(GPU, shape={"variant": frozenset({variant})}),
            cost=COST,
            batch_invariant=True,
            summary=summary,
        )


def made_for(sizes: tuple[str, ...], *, normed: bool) -> Callable[[OpContext], str | None]:
    """Returns a `refuses`: `sizes` must be whole numbers of the shape, a normed row at most LONGEST, a route over
    experts one that these kernels support, and KV stored in a form that the device has."""

    def refuses(context: OpContext) -> str | None:
        missing = [name for name in sizes if not isinstance(context.shape.get(name), int)]
        if missing:
            return f"needs to know {', '.join(missing)}"
        longest = context.shape["size"] if normed else 0
        if isinstance(longest, int) and longest > LONGEST:
            return f"has rows of up to {LONGEST} elements in its registers, not {longest}"
        if "experts" in sizes:
            return _no_route(context)
        return no_fp8(context) if "kv_heads" in sizes or "latent" in sizes else None

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
