"""The kernels for quantized weights and inputs. Their ops are plugin-quantization's.

Measurements choose among them, as for linears. Without measurements packed weights are read once for each tile of up
to 256 tokens, and more tokens go to cuBLAS after the weight was dequantized.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import replace

from llmcore.api import KernelSpec, OpContext, Requires

from llmcore_triton import tuned
from llmcore_triton.specs import COST, CUBLAS_COST, GPU
from llmcore_triton.specs.layouts import FP8
from llmcore_triton.specs.linear import FEW, MANY, ONE, slower_than_parts
from llmcore_triton.specs.rows import EXPERTS, LONGEST, NAME, made_for

_ROWS = {
    "quantize_rows": "whole rows, or blocks of groups",
    "rms_norm_quant": "one program per row",
    "add_rms_norm_quant": "one program per row, the sum in place",
    "silu_and_mul_quant": "whole rows, or blocks of groups",
}
"""Op that writes quantized rows -> how its kernel works."""


def row_kernels() -> Iterable[KernelSpec]:
    """One kernel per op that writes quantized rows. A row's result depends on that row alone."""
    for op, summary in _ROWS.items():
        yield KernelSpec(
            op=op,
            name=NAME,
            make=f"llmcore_triton.quantized.{op}:make",
            when=GPU,
            refuses=_no_rows,
            cost=COST,
            batch_invariant=True,
            summary=summary,
        )


def _no_rows(context: OpContext) -> str | None:
    """Returns why these kernels do not write rows of the context's shape, or None."""
    shape = context.shape
    width, group = shape.get("size"), shape.get("group")
    if not isinstance(width, int) or not isinstance(group, int):
        return "needs to know size, group"
    if (context.op.endswith("_norm_quant") or not (group or shape.get("static"))) and width > LONGEST:
        return f"has rows of up to {LONGEST} elements in its registers, not {width}"
    if group & (group - 1):
        return f"needs groups of a power of two, not {group}"
    return no_codes(context)


def no_codes(context: OpContext) -> str | None:
    """Returns why the device has no arithmetic for the codes of the context's shape, or None."""
    if context.shape.get("codes") != "e4m3" or (context.device.capability or 0) >= FP8:
        return None
    return f"converts fp8 on GPUs of compute capability {FP8} or more"


_CODES = "llmcore_triton.quantized.codes_"
"""The start of the names of modules of linears over codes."""

_GROUP = 128
"""The inputs that share a scale in published checkpoints."""


_BLOCK_SCALES = (12, 9)
"""The first CUDA in which cuBLAS has scales of blocks."""

_GLUON = "3.6."
"""The Triton whose Gluon the kernels use. Gluon is experimental, and its names change."""

_CUBLAS = Requires(
    device="cuda", capability=(90, 90), dtypes=frozenset({"bf16"}), shape={"codes": frozenset({"e4m3"})}
)


def eight_bit_kernels() -> Iterable[KernelSpec]:
    """The kernels of linears whose weights and inputs are codes of 8 bits.

    Without measurements up to 64 tokens go to small_rows, and on Hopper more go to many_rows.
    """
    for op in ("linear.w8a8", "linear.fp8_block"):
        some = KernelSpec(op=op, name="", make="", cost=COST)
        yield replace(
            some,
            name="small_rows",
            make=f"{_CODES}small_rows:make",
            when=replace(GPU, buckets=frozenset({0, 1, 2, 3})),
            refuses=_small_rows,
            summary="codes streamed once for up to 256 tokens",
        )
        yield replace(
            some,
            name="gemv",
            make="llmcore_triton.quantized.gemv:make",
            when=replace(ONE, dtypes=GPU.dtypes),
            refuses=_gemv,
            summary="one token without tensor cores",
        )
        yield replace(
            some,
            name="many_rows",
            make=f"{_CODES}many_rows:make",
            when=replace(MANY, buckets=frozenset({2, 3, 4})),
            refuses=_many_rows,
            summary="tiles of codes, scales applied to sums",
        )
        yield replace(
            some,
            name="cublas",
            make=f"{_CODES}cublas:make",
            when=_CUBLAS,
            refuses=_cublas,
            cost=CUBLAS_COST,
            summary="torch's product of scaled float8",
        )
        yield replace(
            some,
            name="warpgroups",
            make=f"{_CODES}warpgroups:make",
            when=MANY,
            refuses=_warpgroups,
            summary="results written while others are computed",
        )
    yield KernelSpec(
        op="linear.w8a8",
        name="cublas_unscaled",
        make=f"{_CODES}cublas_unscaled:make",
        when=replace(_CUBLAS, buckets=MANY.buckets),
        refuses=_cublas_unscaled,
        cost=COST,
        summary="cuBLAS's product of float8, then the scales",
    )


def _no_linear(context: OpContext) -> str | None:
    """Returns why no kernel here multiplies weights of the context's shape, or None."""
    group = context.shape.get("group")
    if context.op == "linear.fp8_block" and group != _GROUP:
        return f"needs groups of {_GROUP} inputs, not {group}"
    return no_codes(context)


def _small_rows(context: OpContext) -> str | None:
    if (reason := _no_linear(context)) is None and context.bucket > 2 and tuned.find("small_rows", context) is None:
        return "nobody has measured it here for 65 to 256 tokens"
    return reason


def _gemv(context: OpContext) -> str | None:
    if (reason := _misaligned(context, 16, 1) or _no_linear(context)) is None and tuned.find("gemv", context) is None:
        return "nobody has measured it here"
    return reason


def _many_rows(context: OpContext) -> str | None:
    if (reason := _misaligned(context, 16, 8) or _no_linear(context)) is not None:
        return reason
    if context.bucket not in MANY.buckets and tuned.find("many_rows", context) is None:
        return "nobody has measured it here for 17 to 64 tokens"
    return None


def _cublas(context: OpContext) -> str | None:
    # four groups of a block's scales have 16 bytes
    inputs = 4 * _GROUP if context.op == "linear.fp8_block" else 16
    if (reason := _misaligned(context, inputs, 16) or _no_linear(context)) is not None:
        return reason
    if tuned.find("cublas", context) is None:
        return "nobody has measured it here"
    # not imported: commands that list kernels run without torch
    cuda = getattr(getattr(sys.modules.get("torch"), "version", None), "cuda", None)
    if context.op == "linear.fp8_block" and cuda is not None and tuple(map(int, cuda.split("."))) < _BLOCK_SCALES:
        return f"needs a torch for CUDA {'.'.join(map(str, _BLOCK_SCALES))}, which multiplies blocks, not {cuda}"
    return None


def _cublas_unscaled(context: OpContext) -> str | None:
    if (reason := _misaligned(context, 16, 16)) is None and tuned.find("cublas_unscaled", context) is None:
        return "nobody has measured it here"
    return reason


def _warpgroups(context: OpContext) -> str | None:
    reason = _misaligned(context, 16, 16) or _no_linear(context) or _no_gluon()
    if reason is None and tuned.find("warpgroups", context) is None:
        return "nobody has measured it here"
    return reason


def _no_gluon() -> str | None:
    """Returns why kernels in Gluon do not run here, or None."""
    # not imported: commands that list kernels run without triton
    triton = sys.modules.get("triton")
    if triton is None:
        return None
    if triton.knobs.runtime.interpret:
        return "does not run in Triton's interpreter"
    version = triton.__version__
    return None if version.startswith(_GLUON) else f"is written in the Gluon of Triton {_GLUON}x, not of {version}"


def _misaligned(context: OpContext, inputs: int, outputs: int) -> str | None:
    """Returns why a shape does not have multiples of `inputs` and `outputs`, or None."""
    for name, multiple in (("inputs", inputs), ("outputs", outputs)):
        number = context.shape.get(name)
        if not isinstance(number, int) or number % multiple:
            return f"needs {name} to be a multiple of {multiple}, has {number}"
    return None


# --- weights alone are quantized -----------------------------------------------------------------------------------


_HALVES = frozenset({"bf16", "f16"})

_GATED = "_silu_and_mul"


_PART = 64
"""The inputs of a part of a block that direct and warpgroups read."""


def weight_only_kernels() -> Iterable[KernelSpec]:
    """The kernels for linears with weights in 4 and 8 bits and plain inputs, alone and with silu_and_mul."""
    few, many = replace(FEW, dtypes=_HALVES), replace(MANY, capability=FEW.capability)
    kernels = (
        ("small_rows", "weight_only", few, "packed weights streamed once for up to 64 tokens"),
        ("many_rows", "weight_only", many, "packed weights dequantized once for each tile of tokens"),
        ("scratch", "scratch", replace(GPU, dtypes=_HALVES, buckets=many.buckets), "dequantizes, then cuBLAS"),
    )
    hopper = replace(GPU, dtypes=_HALVES, capability=(90, 90), buckets=frozenset({2, 3, 4}))
    in_gluon = (
        ("direct", replace(few, buckets=frozenset({0, 1})), "words go from memory to the registers of products"),
        ("warpgroups", hopper, "converts weights while the tensor cores multiply others"),
    )
    for bits in ("w4a16", "w8a16"):
        for gated in ("", _GATED):
            for name, when, summary in in_gluon:
                yield KernelSpec(
                    op=f"linear.{bits}{gated}",
                    name=name,
                    make=f"llmcore_triton.quantized.{name}:make",
                    when=when,
                    refuses=_refuses_in_gluon(name),
                    cost=COST,
                    summary=summary,
                )
            for name, module, when, summary in kernels:
                yield KernelSpec(
                    op=f"linear.{bits}{gated}",
                    name=name,
                    make=f"llmcore_triton.quantized.{module}:make",
                    when=when,
                    refuses=_refuses_weight_only(name),
                    cost=COST,
                    summary=summary,
                )


def _refuses_weight_only(kernel: str) -> Callable[[OpContext], str | None]:
    def refuses(context: OpContext) -> str | None:
        shape = context.shape
        if "group" not in shape:
            return "is made for one shape, and none is known"
        if int(shape["group"] or 0) % 16:
            return f"needs groups of a multiple of 16 inputs, has {shape['group']}"
        if shape["zeros"] and shape["scale"] == "f32":
            return "has no room for zeros beside scales in f32"
        if kernel == ("many_rows" if context.bucket == 4 else "scratch") and tuned.find(kernel, context) is None:
            return "nobody has measured it here"
        if context.op.endswith(_GATED):
            return slower_than_parts(kernel, context, context.op.removesuffix(_GATED))
        return None

    return refuses


def _no_parts(context: OpContext, inputs: object, group: object) -> str | None:
    """Returns why kernels in Gluon cannot read packed rows of `inputs` inputs in groups of `group`, or None."""
    if not isinstance(inputs, int) or not isinstance(group, int):
        return "is made for one shape, and none is known"
    block = _PART * (4 if context.shape["codes"] == "u4" else 2)
    if group % _PART or inputs % block:
        return f"needs groups of a multiple of {_PART} inputs, and inputs of {block}, has {group} and {inputs}"
    return None


def _refuses_in_gluon(kernel: str) -> Callable[[OpContext], str | None]:
    def refuses(context: OpContext) -> str | None:
        shape = context.shape
        if (reason := _no_parts(context, shape.get("inputs"), shape.get("group"))) is not None:
            return reason
        if shape["zeros"] and shape["scale"] == "f32":
            return "has no room for zeros beside scales in f32"
        if (reason := _no_gluon()) is not None:
            return reason
        if tuned.find(kernel, context) is None:
            return "nobody has measured it here"
        if context.op.endswith(_GATED):
            return slower_than_parts(kernel, context, context.op.removesuffix(_GATED))
        return None

    return refuses


def expert_kernels() -> Iterable[KernelSpec]:
    """Mixtures whose experts have codes of 4 or 8 bits."""
    for bits in (4, 8):
        yield KernelSpec(
            op=f"moe.experts.w{bits}a16",
            name=NAME,
            make="llmcore_triton.quantized.experts:make",
            when=GPU,
            refuses=_no_experts,
            cost=COST,
            batch_invariant=True,
            summary="two launches over tiles of each expert's tokens, codes turned into numbers in registers",
        )
        yield KernelSpec(
            op=f"moe.fused.w{bits}a16",
            name=NAME,
            make="llmcore_triton.quantized.fused:make",
            when=replace(GPU, buckets=frozenset({0, 1})),
            refuses=_no_experts,
            cost=COST,
            summary="four launches for one token, or five as a tile, as for up to 16 tokens; nothing sorted",
        )
    yield KernelSpec(
        op="moe.fused.w4a16",
        name="direct",
        make="llmcore_triton.quantized.direct_experts:make",
        when=replace(ONE, dtypes=_HALVES),
        refuses=_no_direct_experts,
        cost=COST,
        summary="one token, words go from memory to the registers of products",
    )


_made_for = made_for(EXPERTS, normed=False)


def _no_experts(context: OpContext) -> str | None:
    """Why the kernels do not support such experts, or None."""
    if (reason := _made_for(context)) is not None:
        return reason
    if context.shape["zeros"] and context.shape["scale_type"] == "f32":
        return "has no room for zeros beside scales in f32"
    group = int(context.shape["group"] or 0)
    return f"needs groups of a multiple of 16 inputs, has {group}" if group % 16 else None


def _no_direct_experts(context: OpContext) -> str | None:
    """Why kernel direct does not support such experts, or is not known to be the fastest one, or None."""
    if (reason := _no_experts(context)) is not None:
        return reason
    group = int(context.shape["group"] or 0)
    reason = _no_parts(context, context.shape["size"], group) or _no_parts(context, context.shape["inner"], group)
    reason = reason or _no_gluon()
    if reason is None and tuned.find("direct", context) is None:
        return "nobody has measured it here"
    return reason
