"""The kernels of multi-head latent attention."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from llmcore.api import KernelSpec, OpContext, Requires

from llmcore_triton import tuned
from llmcore_triton.specs.common import GPU
from llmcore_triton.specs.rows import NAME, made_for

_DIR = "llmcore_triton.mla"
_TYPED = replace(GPU, dtypes=frozenset({"f32", "f16", "bf16"}))
_LATENT = replace(_TYPED, layouts=frozenset({"mla-latent"}))

LARGEST_LATENT = 512
"""The largest latent, in elements, whose accumulators fit into the registers of a program."""

LARGEST_HEAD = 256

_FEW = 2
"""The last token bucket for which the kernel for few tokens reads a head's matrix."""


def kernels() -> Iterable[KernelSpec]:
    """The kernels: attention over latent rows of any granule, and the ops beside it."""
    yield KernelSpec(
        op="latent_rope_kv_write",
        name=NAME,
        make=f"{_DIR}.latent_rope_kv_write:make",
        when=_LATENT,
        refuses=made_for(("heads", "size", "latent", "rotated"), normed=False),
        cost="llmcore_triton.specs.rows:microseconds",
        batch_invariant=True,
        summary="one pass, queries and row in place",
    )
    yield KernelSpec(
        op="attn.mla.decode",
        name="mla_flashdecoding",
        make=f"{_DIR}.decode:make",
        when=_LATENT,
        refuses=beyond,
        cost=f"{__name__}:microseconds_decode",
        summary="long rows split over programs, all heads of a token in one tile",
    )
    for kind in ("mixed", "prefill", "decode"):
        yield KernelSpec(
            op=f"attn.mla.{kind}",
            name="mla_unified",
            make=f"{_DIR}.unified:make",
            when=_LATENT,
            refuses=beyond_or_not_deterministic if kind == "decode" else beyond,
            cost=f"{__name__}:microseconds_unified",
            # if it can do decode at all, its bits must be those of the others
            priority=60 if kind == "decode" else 50,
            batch_invariant=True,
            summary="rows of any number of query tokens in one launch; deterministic where that is asked for",
        )

    yield KernelSpec(
        op="attn.varlen",
        name="flash_varlen",
        make=f"{_DIR}.varlen:make",
        when=_TYPED,
        refuses=beyond_flash,
        cost=f"{__name__}:microseconds_varlen",
        batch_invariant=True,
        summary="streaming softmax, keys in two parts; blocks that all queries see by TMA",
    )
    yield KernelSpec(
        op="attn.merge",
        name=NAME,
        make=f"{_DIR}.merge:make",
        when=_TYPED,
        refuses=made_for(("heads", "value_size"), normed=False),
        cost="llmcore_triton.specs.rows:microseconds",
        batch_invariant=True,
        summary="one pass, empty parts unread",
    )
    yield KernelSpec(
        op="head_linear",
        name="per_head",
        make=f"{_DIR}.head_linear:make",
        when=_TYPED,
        refuses=_many_tokens,
        cost=f"{_DIR}.head_linear:cost",
        batch_invariant=True,
        summary="each head's matrix streamed once for few tokens",
    )
    yield KernelSpec(
        op="head_linear",
        name="cublas",
        make=f"{_DIR}.head_linear_cublas:make",
        when=Requires(device="cuda"),
        cost=f"{_DIR}.head_linear_cublas:cost",
        summary="torch.bmm",
    )


def microseconds_varlen(context: OpContext) -> float | None:
    """Returns the measured microseconds, or None."""
    return tuned.microseconds("flash_varlen", context)


def microseconds_decode(context: OpContext) -> float | None:
    """Returns the measured microseconds, or None."""
    return tuned.microseconds("mla_flashdecoding", context)


def microseconds_unified(context: OpContext) -> float | None:
    """Returns the measured microseconds, or None."""
    return tuned.microseconds("mla_unified", context)


def beyond(context: OpContext) -> str | None:
    """Returns why these kernels do not support an attention, or None."""
    shape = context.shape
    for name in ("sinks", "window"):
        if shape.get(name):
            return f"has no {name}"
    if (mask := shape.get("mask", "causal")) != "causal":
        return f"has no {mask} mask"
    if (kv_heads := shape.get("kv_heads", 1)) != 1:
        return f"is for one row per token, not {kv_heads} KV heads"
    latent, key = int(shape.get("value_size") or 1), int(shape.get("key_size") or 2)
    if not latent < key <= 2 * latent:
        return f"is for rows of a latent and a smaller rotated part, not {latent} of {key} elements"
    return None if latent <= LARGEST_LATENT else f"is for latents of up to {LARGEST_LATENT} elements, not {latent}"


def beyond_or_not_deterministic(context: OpContext) -> str | None:
    """Returns why another kernel should do decode, or None."""
    return beyond(context) or (None if context.deterministic else "is for --deterministic; others are faster")


def beyond_flash(context: OpContext) -> str | None:
    """Returns why the kernel does not support an attention over tensors, or None."""
    shape = context.shape
    for name in ("sinks", "window", "soft_cap"):
        if shape.get(name):
            return f"has no {name}"
    if (mask := shape.get("mask", "causal")) not in ("causal", "full"):
        return f"has no {mask} mask"
    if float(shape.get("scale") or 1) <= 0:
        return "needs a positive scale"
    heads, kv_heads = int(shape.get("heads") or 1), int(shape.get("kv_heads") or 1)
    if heads % kv_heads:
        return f"needs heads in whole groups, not {heads} over {kv_heads} KV heads"
    largest = max(int(shape.get("key_size") or 1), int(shape.get("value_size") or 1))
    return None if largest <= LARGEST_HEAD else f"is for heads of up to {LARGEST_HEAD} elements, not {largest}"


def _many_tokens(context: OpContext) -> str | None:
    if context.deterministic or context.bucket <= _FEW or tuned.microseconds("per_head", context) is not None:
        return None
    return "nobody has measured it here for more than 64 tokens"
