"""Kernels for the CPU, made of few and cheap calls of torch."""

from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path

from llmcore.api import KernelSpec, OpContext, Requires, hookimpl


@hookimpl
def register_kernels() -> Iterable[KernelSpec]:
    """linear through oneDNN, and rope, sample and attention in few calls of torch."""
    yield KernelSpec(
        op="linear",
        name="onednn",
        make=f"{__name__}.linear:OneDNN",
        when=Requires(device="cpu", dtypes=frozenset({"f32", "bf16"})),
        refuses=_no_onednn,
        summary="oneDNN with weights packed once",
    )
    yield KernelSpec(
        op="rope",
        name="cpu",
        make=f"{__name__}.rope:make",
        when=Requires(device="cpu"),
        refuses=_turns_part_of_a_head,
        summary="three calls",
    )
    yield KernelSpec(
        op="sample",
        name="cpu",
        make=f"{__name__}.sample:make",
        when=Requires(device="cpu"),
        summary="random numbers only for tokens that can win",
    )
    yield KernelSpec(
        op="sample.part",
        name="cpu",
        make=f"{__name__}.sample:make_part",
        when=Requires(device="cpu"),
        summary="draws with the bits of `sample`",
    )
    for kind in ("decode", "prefill"):
        yield KernelSpec(
            op=f"attn.gqa.{kind}",
            name="sdpa",
            make=f"{__name__}.attention:{kind.title()}",
            when=Requires(device="cpu", layouts=frozenset({"token"})),
            refuses=_beyond_sdpa,
            summary="torch's scaled_dot_product_attention over gathered KV",
        )


_FLAGS: Mapping[str, str] = {"f32": "avx2", "bf16": "avx512bw"}
"""dtype -> the x86 processor flag that oneDNN needs for it, as torch checks it."""


@cache
def _processor_flags() -> frozenset[str]:
    file = Path("/proc/cpuinfo")
    text = file.read_text(encoding="utf-8", errors="replace") if file.exists() else ""
    return frozenset(next((line for line in text.splitlines() if line.startswith("flags")), "").split())


def _no_onednn(context: OpContext) -> str | None:
    flag = _FLAGS[context.dtype]
    return None if flag in _processor_flags() else f"needs an x86 processor with {flag} for {context.dtype}"


def _turns_part_of_a_head(context: OpContext) -> str | None:
    rotated, size = context.shape.get("rotated"), context.shape.get("size")
    return None if rotated == size else f"turns whole heads, not {rotated} of {size} elements"


def _beyond_sdpa(context: OpContext) -> str | None:
    shape = context.shape
    if shape.get("soft_cap") is not None or shape.get("sinks"):
        return "has no soft cap and no sinks"
    if shape.get("mask", "causal") != "causal":
        return f"has no {shape['mask']} mask"
    if shape.get("key_size") != shape.get("value_size"):
        return "needs keys and values of one size"
    return None
