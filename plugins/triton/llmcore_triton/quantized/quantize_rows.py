"""quantize_rows, and a kernel for silu_and_mul_quant: rows as codes and scales, whole rows or blocks of groups."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from llmcore.api import OpContext
from llmcore.layers import Op

from llmcore_triton.launch import Bound, overlaps, release, wait
from llmcore_triton.linear_kernels import silu_and_mul
from llmcore_triton.linear_shapes import registers_of
from llmcore_triton.quantized.rows import Outputs, form, store_codes, store_rows
from llmcore_triton.rms_norm import SHORT
from llmcore_triton.rows import choose, power, size, small, warps

WIDE = 8192
"""Columns of rows that take many registers of each thread."""


@triton.jit(do_not_specialize=["n_rows"])
def _quantized(  # type: ignore[no-untyped-def]
    x,
    fixed,
    codes,
    scales,
    n_rows,
    stride,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    GATED: tl.constexpr,
    CODES: tl.constexpr,
    GROUP: tl.constexpr,
    STATIC: tl.constexpr,
    PDL: tl.constexpr,
):
    """Quantizes the rows of x, [n_rows, SIZE], or with GATED what silu_and_mul makes of [n_rows, 2 SIZE].

    With STATIC the scale `fixed` [1] is that of all rows.
    """
    release(PDL)
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    first = tl.program_id(1) * BLOCK
    columns = first + tl.arange(0, BLOCK)
    keep = (rows < n_rows)[:, None] & (columns < SIZE)[None, :]
    start = x + (rows * stride)[:, None] + columns[None, :]
    wait(PDL)
    value = tl.load(start, mask=keep, other=0.0)
    if GATED:
        gate = value.to(tl.float32)
        up = tl.load(start + SIZE, mask=keep, other=0.0).to(tl.float32)
        # the op rounds to the type of x before it quantizes
        value = silu_and_mul(gate, up).to(value.dtype)
    if STATIC:
        scale = tl.full([ROWS, 1], tl.load(fixed), tl.float32)
        tl.store(scales + rows[:, None], scale, mask=(rows < n_rows)[:, None] & (first == 0))
        store_codes(value.to(tl.float32), codes, rows, first, n_rows, scale, SIZE, CODES)
    else:
        store_rows(value, codes, scales, rows, first, n_rows, SIZE, CODES, GROUP)


def _whole(context: OpContext) -> bool:
    """True if a program must see a whole row."""
    return not (context.shape["group"] or context.shape.get("static"))


def default(context: OpContext) -> Mapping[str, Any]:
    """The default: a whole row if it has one scale, else blocks that give few tokens many programs."""
    width = power(size(context, "size"))
    usual = max(1024 if small(context) else 2048, size(context, "group"))
    block = width if _whole(context) else min(width, usual)
    return {"block": block, "num_warps": warps(context, max(block, SHORT), 1)}


def candidates(context: OpContext) -> Iterator[dict[str, Any]]:
    """Blocks from a group to 4,096 columns, or whole rows; from one to eight loads per thread.

    Of wide rows that follow each other, also registers for two programs of a multiprocessor: one loads while the other
    computes.
    """
    width, group = power(size(context, "size")), size(context, "group")
    blocks = {width} if _whole(context) else {min(block, width) for block in (256, 512, 1024, 2048, 4096)}
    for block in sorted(blocks):
        if group <= block:
            for number in (1, 2, 4, 8, 16, 32):
                if number * 32 * 4 <= max(block, SHORT) <= number * 32 * (64 if _whole(context) else 16):
                    yield {"block": block, "num_warps": number}
                    if block >= WIDE and number >= 8 and not small(context):
                        yield {"block": block, "num_warps": number, "maxnreg": registers_of(2 * 32 * number)}


def launcher(
    context: OpContext, config: Mapping[str, Any], *, gated: bool
) -> Callable[[torch.Tensor, torch.Tensor | None], tuple[torch.Tensor, torch.Tensor]]:
    """Returns the kernel in the configuration `config`: (x, fixed scale | None) -> (codes, scales)."""
    width, pdl, outputs = size(context, "size"), overlaps(context), Outputs(context)
    block = config["block"]
    rows, blocks = max(1, SHORT // block), -(-width // block)
    static = bool(context.shape.get("static"))
    fixed = {"SIZE": width, "BLOCK": block, "ROWS": rows, "GATED": gated, "STATIC": static, "PDL": pdl}
    options = {name: value for name, value in config.items() if name != "block"}
    launch = Bound(_quantized, **fixed, **form(context), launch_pdl=pdl, **options)

    def run(x: torch.Tensor, scale: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """x [T, size], or [T, 2 size] for a gated activation -> codes [T, size], scales [T, size / group]."""
        n, (codes, scales) = x.shape[0], outputs(x)
        launch(((n + rows - 1) // rows, blocks), x, scales if scale is None else scale, codes, scales, n, x.stride(0))
        return codes, scales

    return run


def make_with(context: OpContext, config: Mapping[str, Any]) -> Op:
    """The kernel in the configuration `config`."""
    return launcher(context, config, gated=False)


def make(context: OpContext) -> Op:
    """The kernel in the measured configuration, or in the default one."""
    return make_with(context, choose(context, default(context)))
