"""The attention kernels, and the other kernels of multi-head latent attention.

Decode has three of one priority: `auto` takes the fastest measured one. Without measurements the narrower requirement
decides, so `gqa_flashdecoding` takes what the others leave.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from llmcore.api import KernelSpec, ModeSpec, OpContext, Requires

from llmcore_triton import tuned
from llmcore_triton.specs import COST, CUBLAS_COST, GPU, other_than_deterministic
from llmcore_triton.specs.layouts import LATENT, QUANTIZED, QUANTIZED_LATENT, TOKEN, no_fp8
from llmcore_triton.specs.rows import NAME, made_for

_DIR = "llmcore_triton.attention"
_TOKEN = replace(GPU, layouts=frozenset({TOKEN, *QUANTIZED}))
_TYPED = replace(_TOKEN, dtypes=frozenset({"f32", "f16", "bf16"}))

LARGEST_HEAD = 256
LARGEST_GROUP = 128


def kernels() -> Iterable[KernelSpec]:
    """The kernels. All read KV of heads in any granule, in the model's type or quantized."""
    yield KernelSpec(
        op="attn.gqa.decode",
        name="gqa_flashdecoding",
        make=f"{_DIR}.gqa_flashdecoding:make",
        when=replace(_TYPED, buckets=frozenset(range(5))),
        refuses=beyond,
        cost=COST,
        summary="long rows split over programs, the heads of a group in one tile",
    )
    yield KernelSpec(
        op="attn.gqa.decode",
        name="gqa_attention",
        make=f"{_DIR}.gqa_attention:make",
        when=_TYPED,
        refuses=beyond,
        cost=COST,
        summary="one program per row and KV head, the heads of a group in one tile",
    )
    yield KernelSpec(
        op="attn.gqa.decode",
        name="flashdecoding",
        make=f"{_DIR}.flashdecoding:make",
        when=_TOKEN,
        refuses=beyond,
        cost=COST,
        summary="long rows split over programs, one query head each, no matrix products",
    )
    yield KernelSpec(
        op="attn.gqa.prefill",
        name="flash",
        make=f"{_DIR}.prefill:make",
        when=_TOKEN,
        refuses=beyond_flash,
        cost=COST,
        summary="streaming softmax; new keys by TMA, a cached prefix from its slots",
    )
    for kind in ("mixed", "decode", "prefill"):
        yield KernelSpec(
            op=f"attn.gqa.{kind}",
            name="unified",
            make=f"{_DIR}.unified:make",
            when=_TOKEN,
            refuses=beyond if kind == "mixed" else beyond_or_not_deterministic,
            cost=COST,
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
    for name in ("ppl_fp16", "ppl_fp16_flashdecoding"):
        yield ModeSpec(
            name=name,
            kernels={"attn.gqa.decode": "gqa_flashdecoding"},
            dtypes=frozenset({"f16"}),
            summary="decode over split KV; nothing is quantized",
        )


def beyond(context: OpContext, largest_group: int = LARGEST_GROUP) -> str | None:
    """Returns why these kernels do not support an attention, or None."""
    shape = context.shape
    heads, kv_heads = int(shape.get("heads") or 1), int(shape.get("kv_heads") or 1)
    if shape.get("sinks"):
        return "has no sinks"
    if (mask := shape.get("mask", "causal")) != "causal":
        return f"has no {mask} mask"
    if heads % kv_heads:
        return f"needs heads in whole groups, not {heads} over {kv_heads} KV heads"
    if heads // kv_heads > largest_group:
        return f"is for groups of up to {largest_group} heads, not {heads // kv_heads}"
    largest = max(int(shape.get("key_size") or 1), int(shape.get("value_size") or 1))
    if largest > LARGEST_HEAD:
        return f"is for heads of up to {LARGEST_HEAD} elements, not {largest}"
    return no_fp8(context)


def beyond_or_not_deterministic(context: OpContext) -> str | None:
    """Returns why another kernel should do decode or prefill, or None."""
    return beyond(context) or other_than_deterministic(context)


def beyond_flash(context: OpContext, largest_group: int = LARGEST_GROUP) -> str | None:
    """The same as `beyond`, for a kernel that also supports attention without a causal mask."""
    shape = context.shape
    if float(shape.get("scale") or 1) <= 0:
        return "needs a positive scale"
    causal = replace(context, shape={**shape, "mask": "causal"}) if shape.get("mask") == "full" else context
    return beyond(causal, largest_group)


_MLA = "llmcore_triton.mla"
_TENSORS = replace(GPU, dtypes=frozenset({"f32", "f16", "bf16"}))
_LATENT = replace(_TENSORS, layouts=frozenset({LATENT, *QUANTIZED_LATENT}))

LARGEST_LATENT = 512
"""The largest latent, in elements, whose accumulators fit into the registers of a program."""

_FEW = 2
"""The last token bucket for which the kernel for few tokens reads a head's matrix."""


def latent_kernels() -> Iterable[KernelSpec]:
    """The kernels: attention over latent rows of any granule, and the ops beside it."""
    yield KernelSpec(
        op="latent_rope_kv_write",
        name=NAME,
        make=f"{_MLA}.latent_rope_kv_write:make",
        when=_LATENT,
        refuses=made_for(("heads", "size", "latent", "rotated"), normed=False),
        cost=COST,
        batch_invariant=True,
        summary="one pass, queries and row in place",
    )
    yield KernelSpec(
        op="attn.mla.decode",
        name="mla_flashdecoding",
        make=f"{_MLA}.decode:make",
        when=_LATENT,
        refuses=latent_beyond,
        cost=COST,
        summary="long rows split over programs, all heads of a token in one tile",
    )
    for kind in ("mixed", "prefill", "decode"):
        yield KernelSpec(
            op=f"attn.mla.{kind}",
            name="mla_unified",
            make=f"{_MLA}.unified:make",
            when=_LATENT,
            refuses=latent_beyond_or_not_deterministic if kind == "decode" else latent_beyond,
            cost=COST,
            # if it can do decode at all, its bits must be those of the others
            priority=60 if kind == "decode" else 50,
            batch_invariant=True,
            summary="rows of any number of query tokens in one launch; deterministic where that is asked for",
        )

    yield KernelSpec(
        op="attn.varlen",
        name="flash_varlen",
        make=f"{_MLA}.varlen:make",
        when=_TENSORS,
        refuses=beyond_varlen,
        cost=COST,
        batch_invariant=True,
        summary="streaming softmax, keys in two parts; blocks that all queries see by TMA",
    )
    yield KernelSpec(
        op="attn.merge",
        name=NAME,
        make=f"{_MLA}.merge:make",
        when=_TENSORS,
        refuses=made_for(("heads", "value_size"), normed=False),
        cost=COST,
        batch_invariant=True,
        summary="one pass, empty parts unread",
    )
    yield KernelSpec(
        op="head_linear",
        name="per_head",
        make=f"{_MLA}.head_linear:make",
        when=_TENSORS,
        refuses=_many_tokens,
        cost=COST,
        batch_invariant=True,
        summary="each head's matrix streamed once for few tokens",
    )
    yield KernelSpec(
        op="head_linear",
        name="cublas",
        make=f"{_MLA}.head_linear_cublas:make",
        when=Requires(device="cuda"),
        cost=CUBLAS_COST,
        summary="torch.bmm",
    )


def latent_beyond(context: OpContext) -> str | None:
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
    if latent > LARGEST_LATENT:
        return f"is for latents of up to {LARGEST_LATENT} elements, not {latent}"
    return no_fp8(context)


def latent_beyond_or_not_deterministic(context: OpContext) -> str | None:
    """Returns why another kernel should do decode, or None."""
    return latent_beyond(context) or other_than_deterministic(context)


def beyond_varlen(context: OpContext) -> str | None:
    """Returns why the kernel does not support an attention over tensors, or None."""
    for name in ("window", "soft_cap"):
        if context.shape.get(name):
            return f"has no {name}"
    return beyond_flash(context, largest_group=int(context.shape.get("heads") or 1))


def _many_tokens(context: OpContext) -> str | None:
    if context.deterministic or context.bucket <= _FEW or tuned.find("per_head", context):
        return None
    return "nobody has measured it here for more than 64 tokens"
