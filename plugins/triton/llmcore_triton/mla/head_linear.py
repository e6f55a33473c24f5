"""head_linear, kernel per_head: reads every head's matrix once if there are few tokens.

A program takes a block of one head's outputs. If a block's weights fit into registers, they load before the kernel
ahead has ended. The program waits for that kernel's results only when it needs them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from llmcore.api import OpContext
from llmcore.layers import DTYPES

from llmcore_triton import tuned
from llmcore_triton.launch import Bound, overlaps, release, wait

KERNEL = "per_head"

Config = Mapping[str, Any]
"""`block_m`: tokens of a tile; `block_n`: outputs; `block_k`: inputs of a step; `warps`; `stages` of the pipeline."""

_LEAST_SIDE = 16
"""The smallest side of a block in `tl.dot`."""

_FEW = 2
"""The last token bucket that is bound by memory."""


@triton.jit(do_not_specialize=["tokens"])
def per_head(  # type: ignore[no-untyped-def]
    x, weight, beside, out, tokens, outputs, inputs, x_stride, x_head, w_head, w_out, w_in, beside_stride, beside_head,
    out_stride, out_head,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, ONE: tl.constexpr, EVEN: tl.constexpr,
    BESIDE: tl.constexpr, PAD_BESIDE: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (block of outputs, head, tile of tokens). ONE: a block has all inputs. EVEN: blocks need no masks.

    BESIDE: elements that are copied behind each head's outputs.
    """
    head = tl.program_id(1)
    lines = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.arange(0, BLOCK_K)
    from_w = weight + head.to(tl.int64) * w_head + lines[None, :] * w_out + columns[:, None] * w_in
    from_x = x + rows.to(tl.int64)[:, None] * x_stride + head * x_head + columns[None, :]
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    there = (rows < tokens)[:, None]
    if ONE:
        if EVEN:
            w = tl.load(from_w)
        else:
            w = tl.load(from_w, mask=(columns < inputs)[:, None] & (lines < outputs)[None, :], other=0.0)
        wait(PDL)
        release(PDL)
        part = tl.load(from_x, mask=there if EVEN else there & (columns < inputs)[None, :], other=0.0)
        acc = tl.dot(part, w, acc, input_precision="ieee")
    else:
        wait(PDL)
        release(PDL)
        for start in tl.range(0, inputs, BLOCK_K, num_stages=STAGES):
            if EVEN:
                step = tl.load(from_w + start * w_in)
                part = tl.load(from_x + start, mask=there, other=0.0)
            else:
                inside = start + columns < inputs
                step = tl.load(from_w + start * w_in, mask=inside[:, None] & (lines < outputs)[None, :], other=0.0)
                part = tl.load(from_x + start, mask=there & inside[None, :], other=0.0)
            acc = tl.dot(part, step, acc, input_precision="ieee")
    places = out + rows.to(tl.int64)[:, None] * out_stride + head * out_head
    tl.store(places + lines[None, :], acc.to(out.dtype.element_ty), mask=there & (lines < outputs)[None, :])
    if BESIDE > 0:  # noqa: SIM102 - known when compiling
        if tl.program_id(0) == 0:
            at = tl.arange(0, PAD_BESIDE)
            inside = there & (at < BESIDE)[None, :]
            source = beside + rows.to(tl.int64)[:, None] * beside_stride + head * beside_head
            tl.store(places + outputs + at[None, :], tl.load(source + at[None, :], mask=inside), mask=inside)


class PerHead:
    """The op, bound to a configuration."""

    def __init__(self, context: OpContext, config: Config) -> None:
        self._config, self._pdl = config, overlaps(context)
        self._launch = Bound(
            per_head,
            BLOCK_M=config["block_m"],
            STAGES=config["stages"],
            PDL=self._pdl,
            launch_pdl=self._pdl,
            num_warps=config["warps"],
            num_stages=config["stages"],
        )

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, beside: torch.Tensor | None = None) -> torch.Tensor:
        """x [T, heads, inputs], weight [heads, outputs, inputs] of any strides, beside [T, heads, rest] or None ->
        [T, heads, outputs + rest]."""
        tokens, (heads, outputs, inputs) = x.shape[0], weight.shape
        rest = 0 if beside is None else beside.shape[2]
        out = x.new_empty(tokens, heads, outputs + rest)
        copied = x if beside is None else beside
        config = self._config
        block_n, block_k = min(config["block_n"], _padded(outputs)), min(config["block_k"], _padded(inputs))
        launch = self._launch.but(
            BLOCK_N=block_n,
            BLOCK_K=block_k,
            ONE=inputs <= block_k,
            EVEN=inputs % block_k == 0 and outputs % block_n == 0,
            BESIDE=rest,
            PAD_BESIDE=_padded(rest),
        )
        launch(
            (-(-outputs // block_n), heads, -(-tokens // config["block_m"])),
            *(x, weight, copied, out, tokens, outputs, inputs, x.stride(0), x.stride(1), *weight.stride()),
            *(copied.stride(0), copied.stride(1), out.stride(0), out.stride(1)),
        )
        return out


def _padded(size: int) -> int:
    return max(int(triton.next_power_of_2(size)), _LEAST_SIDE)


def default(context: OpContext) -> dict[str, Any]:
    """Returns about one program per multiprocessor for few tokens, and square tiles for many."""
    if context.dtype == "f32":
        return {"block_m": 16, "block_n": 32, "block_k": 32, "warps": 4, "stages": 2}
    if context.deterministic:
        return {"block_m": 64, "block_n": 64, "block_k": 64, "warps": 4, "stages": 3}
    if context.bucket > _FEW:
        return {"block_m": 128, "block_n": 128, "block_k": 64, "warps": 8, "stages": 3}
    heads, outputs, inputs = (int(context.shape.get(name) or 128) for name in ("heads", "outputs", "inputs"))
    blocks = max((context.device.processors or 132) // heads, 1)
    block_n = max(int(triton.next_power_of_2(-(-outputs // blocks))), _LEAST_SIDE)
    block_m = 64 if context.bucket == _FEW else _LEAST_SIDE
    # more inputs than fit into registers come in steps
    one = _padded(inputs) * block_n * DTYPES[context.dtype].itemsize <= _IN_REGISTERS
    block_k = _padded(inputs) if one else 128
    return {"block_m": block_m, "block_n": min(block_n, 128), "block_k": block_k, "warps": 4, "stages": 3}


_IN_REGISTERS = 16 << 10
"""Bytes of weights that the registers of four warps hold."""


def candidates(context: OpContext) -> Iterator[dict[str, Any]]:
    """Configurations worth timing. There are none if all buckets must agree."""
    if context.deterministic:
        return
    base = default(context)
    yield base
    if context.dtype == "f32":
        return
    if context.bucket > _FEW:
        for block_m, block_n, block_k, warps, stages in (
            *((64, 128, 64, 4, 4), (128, 128, 128, 8, 2), (128, 64, 64, 4, 3), (64, 64, 128, 4, 3)),
            *((128, 256, 64, 8, 3),),
        ):
            yield {"block_m": block_m, "block_n": block_n, "block_k": block_k, "warps": warps, "stages": stages}
        return
    for block_n in (16, 32, 64, 128):
        for block_k in (128, 256, 512):
            for warps in (2, 4, 8):
                if 32 <= block_n * block_k // (32 * warps) <= 128:
                    yield {**base, "block_n": block_n, "block_k": block_k, "warps": warps}


def make_with(context: OpContext, config: Config) -> PerHead:
    """The op in the configuration `config`."""
    return PerHead(context, config)


def make(context: OpContext) -> PerHead:
    """The op in the fastest measured configuration, or in the default one."""
    config = default(context)
    return make_with(context, config if context.deterministic else tuned.choose(KERNEL, context, config))
