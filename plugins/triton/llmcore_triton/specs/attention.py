"""The attention kernels.

Decode has three of one priority: `auto` takes the fastest measured one. Without measurements the narrower requirement
decides, so `gqa_flashdecoding` takes what the others leave.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from llmcore.api import KernelSpec, ModeSpec, OpContext

from llmcore_triton import tuned
from llmcore_triton.specs.common import GPU

_DIR = "llmcore_triton.attention"
_TOKEN = replace(GPU, layouts=frozenset({"token"}))
_TYPED = replace(_TOKEN, dtypes=frozenset({"f32", "f16", "bf16"}))

LARGEST_HEAD = 256
LARGEST_GROUP = 128


def kernels() -> Iterable[KernelSpec]:
    """The kernels. All read KV of the layout `token`, of any granule."""
    yield KernelSpec(
        op="attn.gqa.decode",
        name="gqa_flashdecoding",
        make=f"{_DIR}.gqa_flashdecoding:make",
        when=replace(_TYPED, buckets=frozenset(range(5))),
        refuses=beyond,
        cost=f"{__name__}:microseconds_gqa_flashdecoding",
        summary="long rows split over programs, the heads of a group in one tile",
    )
    yield KernelSpec(
        op="attn.gqa.decode",
        name="gqa_attention",
        make=f"{_DIR}.gqa_attention:make",
        when=_TYPED,
        refuses=beyond,
        cost=f"{__name__}:microseconds_gqa_attention",
        summary="one program per row and KV head, the heads of a group in one tile",
    )
    yield KernelSpec(
        op="attn.gqa.decode",
        name="flashdecoding",
        make=f"{_DIR}.flashdecoding:make",
        when=_TOKEN,
        refuses=beyond,
        cost=f"{__name__}:microseconds_flashdecoding",
        summary="long rows split over programs, one query head each, no matrix products",
    )
    yield KernelSpec(
        op="attn.gqa.prefill",
        name="flash",
        make=f"{_DIR}.prefill:make",
        when=_TOKEN,
        refuses=beyond_flash,
        cost=f"{_DIR}.prefill:cost",
        summary="streaming softmax; new keys by TMA, a cached prefix from its slots",
    )
    for kind in ("mixed", "decode", "prefill"):
        yield KernelSpec(
            op=f"attn.gqa.{kind}",
            name="unified",
            make=f"{_DIR}.unified:make",
            when=_TOKEN,
            refuses=beyond if kind == "mixed" else beyond_or_not_deterministic,
            cost=f"{__name__}:microseconds_unified",
            # if it can do decode and prefill at all, it must do both: their bits have to come from one kernel
            priority=50 if kind == "mixed" else 60,
            batch_invariant=True,
            summary="rows of any number of query tokens in one launch; deterministic where that is asked for",
        )


def modes() -> Iterable[ModeSpec]:
    """The modes for decoding, by name."""
    for name, summary in (
        ("flashdecoding", "split KV, one query head at a time"),
        ("gqa_attention", "grouped query heads, KV not split"),
        ("gqa_flashdecoding", "grouped query heads over split KV"),
    ):
        yield ModeSpec(name=f"triton_{name}", kernels={"attn.gqa.decode": name}, summary=f"decode with {summary}")


def microseconds_gqa_flashdecoding(context: OpContext) -> float | None:
    """Returns the measured microseconds, or None."""
    return tuned.microseconds("gqa_flashdecoding", context)


def microseconds_gqa_attention(context: OpContext) -> float | None:
    """Returns the measured microseconds, or None."""
    return tuned.microseconds("gqa_attention", context)


def microseconds_flashdecoding(context: OpContext) -> float | None:
    """Returns the measured microseconds, or None."""
    return tuned.microseconds("flashdecoding", context)


def microseconds_unified(context: OpContext) -> float | None:
    """Returns the measured microseconds, or None."""
    return tuned.microseconds("unified", context)


def beyond(context: OpContext) -> str | None:
    """Returns why these kernels do not support an attention, or None."""
    shape = context.shape
    heads, kv_heads = int(shape.get("heads") or 1), int(shape.get("kv_heads") or 1)
    if shape.get("sinks"):
        return "has no sinks"
    if (mask := shape.get("mask", "causal")) != "causal":
        return f"has no {mask} mask"
    if heads % kv_heads:
        return f"needs heads in whole groups, not {heads} over {kv_heads} KV heads"
    if heads // kv_heads > LARGEST_GROUP:
        return f"is for groups of up to {LARGEST_GROUP} heads, not {heads // kv_heads}"
    largest = max(int(shape.get("key_size") or 1), int(shape.get("value_size") or 1))
    return None if largest <= LARGEST_HEAD else f"is for heads of up to {LARGEST_HEAD} elements, not {largest}"


def beyond_or_not_deterministic(context: OpContext) -> str | None:
    """Returns why another kernel should do decode or prefill, or None."""
    return beyond(context) or (None if context.deterministic else "is for --deterministic; others are faster")


def beyond_flash(context: OpContext) -> str | None:
    """The same as `beyond`, for a kernel that also supports attention without a causal mask."""
    shape = context.shape
    if float(shape.get("scale") or 1) <= 0:
        return "needs a positive scale"
    return beyond(replace(context, shape={**shape, "mask": "causal"}) if shape.get("mask") == "full" else context)
