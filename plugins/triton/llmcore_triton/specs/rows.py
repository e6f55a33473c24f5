"""The row-wise kernels. A row's result depends on that row alone, and every bucket computes it in the same order."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from llmcore.api import KernelSpec, OpContext

from llmcore_triton import tuned
from llmcore_triton.specs.common import GPU

NAME = "triton"
"""The name of every kernel here. There is one per op."""

LONGEST = 32768
"""Elements of a row that fit into the registers of one program."""

_HEADS = ("heads", "size", "rotated")

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
)
"""Op, the sizes that a kernel is made for, and a short description."""


def kernels() -> Iterable[KernelSpec]:
    """One kernel per op."""
    for op, sizes, summary in _KERNELS:
        layouts = frozenset({"token"} if "kv_heads" in sizes else ())
        yield KernelSpec(
            op=op,
            name=NAME,
            make=f"llmcore_triton.{op}:make",
            when=replace(GPU, layouts=layouts),
            refuses=made_for(sizes, normed=op.endswith("_norm")),
            cost="llmcore_triton.specs.rows:microseconds",
            batch_invariant=True,
            summary=summary,
        )


def microseconds(context: OpContext) -> float | None:
    """Returns the measured microseconds, or None."""
    return tuned.microseconds(NAME, context)


def made_for(sizes: tuple[str, ...], *, normed: bool) -> Callable[[OpContext], str | None]:
    """Returns a `refuses`: `sizes` must be whole numbers of the shape, and a normed row at most LONGEST."""

    def refuses(context: OpContext) -> str | None:
        missing = [name for name in sizes if not isinstance(context.shape.get(name), int)]
        if missing:
            return f"needs to know {', '.join(missing)}"
        longest = context.shape["size"] if normed else 0
        if isinstance(longest, int) and longest > LONGEST:
            return f"has rows of up to {LONGEST} elements in its registers, not {longest}"
        return None

    return refuses
