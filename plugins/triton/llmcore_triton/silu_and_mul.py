"""silu_and_mul: one program for each token and block of columns. It rounds once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from llmcore.api import OpContext
from llmcore.layers import Op

from llmcore_triton.launch import Bound, overlaps, release, wait
from llmcore_triton.linear_kernels import silu_and_mul
from llmcore_triton.rows import choose, power, size, small, warps


@triton.jit
def _gated(x, out, stride, SIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    keep = columns < SIZE
    start = x + row * stride + columns
    wait(PDL)
    release(PDL)
    gate = tl.load(start, mask=keep).to(tl.float32)
    up = tl.load(start + SIZE, mask=keep).to(tl.float32)
    tl.store(out + row * SIZE + columns, silu_and_mul(gate, up).to(out.dtype.element_ty), mask=keep)


def default(context: OpContext) -> Mapping[str, Any]:
    """The default: blocks that give few tokens many programs."""
    block = min(power(size(context, "size")), 1024 if small(context) else 2048)
    return {"block": block, "num_warps": warps(context, block, 1)}


def candidates(context: OpContext) -> Iterator[dict[str, Any]]:
    """Blocks from half a row to 4,096 columns, one or two loads per thread."""
    for block in (256, 512, 1024, 2048, 4096):
        if block <= power(size(context, "size")):
            for vectors in (1, 2):
                yield {"block": block, "num_warps": warps(context, block, vectors)}


def make_with(context: OpContext, config: Mapping[str, Any]) -> Op:
    """The kernel in the configuration `config`."""
    return over_columns(_gated, context, config)


def over_columns(kernel: Any, context: OpContext, config: Mapping[str, Any]) -> Op:
    """Returns `kernel` in the configuration `config`. It has the arguments of `_gated`, and gives [T, size]."""
    width, pdl = size(context, "size"), overlaps(context)
    block = config["block"]
    blocks = -(-width // block)
    fixed = {"SIZE": width, "BLOCK": block, "PDL": pdl, "launch_pdl": pdl, "num_warps": config["num_warps"]}
    launch = Bound(kernel, **fixed)

    def run(x: torch.Tensor) -> torch.Tensor:
        """x [T, size], or [T, 2 size] for a gated activation -> [T, size]."""
        n = x.shape[0]
        out = x.new_empty(n, width)
        launch((n, blocks), x, out, x.stride(0))
        return out

    return run


def make(context: OpContext) -> Op:
    """The kernel in the measured configuration, or in the default one."""
    return make_with(context, choose(context, default(context)))
