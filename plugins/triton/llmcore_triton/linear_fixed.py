"""linear, kernel fixed: the bits of a row depend on that row alone.

Every token count uses tiles of one size, one number of warps and one order over the inputs. So each output is the same
sum in the same order, whichever tile its row is in. `stages`, the number of tiles in flight, changes no sum and is
free: few tokens want as many as fit, and many tokens want two programs per multiprocessor.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from llmcore.api import OpContext

from llmcore_triton import tuned
from llmcore_triton.launch import Bound, overlaps, release, wait
from llmcore_triton.linear_kernels import touch
from llmcore_triton.linear_shapes import element_bytes, shared_bytes

KERNEL = "fixed"

BLOCK_M, BLOCK_N, WARPS = 64, 128, 4
_BLOCK_K = {2: 64, 4: 32}
"""Bytes of an element -> inputs per step."""

_FEW = 2
"""The last token bucket that is bound by memory."""


@triton.jit(do_not_specialize=["tokens"])
def tiles_of_one_size(  # type: ignore[no-untyped-def]
    x, weight, bias, out, tokens, outputs, inputs, x_stride,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
    HAS_BIAS: tl.constexpr, EVEN_K: tl.constexpr, DEPTH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out [tokens, outputs] = x weight^T. GROUP tiles of tokens use the same weights while the L2 cache holds them."""
    program = tl.program_id(0)
    tiles_m, tiles_n = tl.cdiv(tokens, BLOCK_M), tl.cdiv(outputs, BLOCK_N)
    group = program // (GROUP * tiles_n)
    height = tl.minimum(tiles_m - group * GROUP, GROUP)
    inside = program - group * GROUP * tiles_n
    tile_m, tile_n = group * GROUP + inside % height, inside // height
    k_steps = tl.cdiv(inputs, BLOCK_K)
    if PDL:
        touch(
            weight, tile_n * k_steps, (tile_n + 1) * k_steps, k_steps, outputs, inputs,
            BLOCK_N, BLOCK_K, DEPTH, 256 // weight.dtype.element_ty.primitive_bitwidth,
        )  # fmt: skip
    wait(PDL)
    release(PDL)
    rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    lines = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    columns = tl.arange(0, BLOCK_K)
    # places outside read the last row or line, and are not written
    from_x = x + tl.minimum(rows, tokens - 1).to(tl.int64)[:, None] * x_stride + columns[None, :]
    from_w = weight + tl.minimum(lines, outputs - 1).to(tl.int64)[:, None] * inputs + columns[None, :]
    acc = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for k in range(0, k_steps):
        if EVEN_K:
            xs, ws = tl.load(from_x + k * BLOCK_K), tl.load(from_w + k * BLOCK_K)
        else:
            here = (k * BLOCK_K + columns < inputs)[None, :]
            xs = tl.load(from_x + k * BLOCK_K, mask=here, other=0.0)
            ws = tl.load(from_w + k * BLOCK_K, mask=here, other=0.0)
        acc = tl.dot(xs, tl.trans(ws), acc, input_precision="ieee")
    if HAS_BIAS:
        acc += tl.load(bias + lines, mask=lines < outputs, other=0.0).to(tl.float32)[None, :]
    places = out + rows.to(tl.int64)[:, None] * outputs + lines[None, :]
    tl.store(places, acc.to(out.dtype.element_ty), mask=(rows < tokens)[:, None] & (lines < outputs)[None, :])


class Fixed:
    """The op for any number of tokens."""

    def __init__(self, context: OpContext, config: Mapping[str, Any]) -> None:
        element = element_bytes(context)
        self._block_k = _BLOCK_K[element]
        blocks = 1 if context.bucket <= _FEW else 2
        room = shared_bytes(context, blocks) // ((BLOCK_M + BLOCK_N) * self._block_k * element)
        stages = max(min(config["stages"], room), 1)
        overlap = overlaps(context)
        options = {
            "BLOCK_M": BLOCK_M,
            "BLOCK_N": BLOCK_N,
            "BLOCK_K": self._block_k,
            "GROUP": config["group"],
            "DEPTH": stages - 1 if context.bucket <= _FEW else 0,
            "PDL": overlap,
            "num_warps": WARPS,
            "num_stages": stages,
            "launch_pdl": overlap,
        }
        self._launch = Bound(tiles_of_one_size, **options)

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x [T, inputs], weight [outputs, inputs] -> [T, outputs]."""
        tokens, (outputs, inputs) = x.shape[0], weight.shape
        out = x.new_empty(tokens, outputs)
        self._launch.but(HAS_BIAS=bias is not None, EVEN_K=inputs % self._block_k == 0)(
            (-(-tokens // BLOCK_M) * -(-outputs // BLOCK_N),),
            *(x, weight, weight if bias is None else bias, out, tokens, outputs, inputs, x.stride(0)),
        )
        return out


def _default(context: OpContext) -> dict[str, Any]:
    return {"stages": 8 if context.bucket <= _FEW else 4, "group": 16}


def make_with(context: OpContext, config: Mapping[str, Any]) -> Fixed:
    """The op in the configuration `config`, none of which changes a bit of the results."""
    return Fixed(context, {**_default(context), **config})


def make(context: OpContext) -> Fixed:
    """The op in the fastest measured configuration, or in the default one."""
    return make_with(context, tuned.choose(KERNEL, context, _default(context)))


def candidates(context: OpContext) -> Iterator[dict[str, Any]]:
    """Configurations worth timing."""
    for stages in (4, 6, 8) if context.bucket <= _FEW else (3, 4):
        for group in (16,) if context.bucket <= _FEW else (4, 16, 32):
            yield {"stages": stages, "group": group}
