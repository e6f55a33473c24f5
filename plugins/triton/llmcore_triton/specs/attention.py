"""The attention kernels."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from llmcore.api import KernelSpec, ModeSpec, OpContext

from llmcore_triton.specs.common import GPU

_TOKENS = replace(GPU, layouts=frozenset({"token"}))


def kernels() -> Iterable[KernelSpec]:
    """Over the token layout."""
    yield KernelSpec(
        op="attn.gqa.prefill",
        name="flash",
        make="llmcore_triton.attention.prefill:make",
        when=_TOKENS,
        refuses=_beyond_flash,
        cost="llmcore_triton.attention.prefill:cost",
        batch_invariant=True,
        summary="streaming softmax; new keys by TMA, a cached prefix from its slots",
    )


def _beyond_flash(context: OpContext) -> str | None:
    shape = context.shape
    if shape.get("sinks"):
        return "has no sinks"
    if shape.get("mask", "causal") not in ("causal", "full"):
        return f"has no {shape['mask']} mask"
    if max(int(shape.get(size) or 0) for size in ("key_size", "value_size")) > 256:
        return "takes heads of up to 256 elements"
    if float(shape.get("scale") or 1.0) <= 0:
        return "needs a positive scale"
    return None


def modes() -> Iterable[ModeSpec]:
    """None yet."""
    return ()
