"""linear_silu_and_mul, kernel many_rows: gate, up and their activation in one launch for more than 64 tokens.

As separate ops, gate and up would go to memory and back: 0.9 GB for 8,192 tokens of Llama-3.1-8B, 5 % of the op's
time. Here they stay in registers. The weights of a step alternate: eight rows of the gate, the same eight of up, and
so on. TMA cuts such a box out of the weight as it is. Of every eight columns of a product a thread holds the same two
(PTX ISA, wgmma.mma_async.m64nNk16, layout of D). So one multiplication serves both, and a thread that has a gate also
has its up.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from llmcore.api import OpContext
from llmcore.layers import Op
from triton.tools.tensor_descriptor import TensorDescriptor

from llmcore_triton import linear_kernels, silu_and_mul, tuned
from llmcore_triton.launch import Bound, Box, overlaps, release, wait
from llmcore_triton.linear_kernels import tile_at
from llmcore_triton.linear_shapes import TMA_ALIGNED, known_sizes, processors

KERNEL = "many_rows"

DEFAULT: dict[str, Any] = {"block_m": 128, "block_n": 128, "block_k": 64, "warps": 8, "stages": 3, "group": 16}
"""A step is `block_m` tokens by `block_n` results by `block_k` inputs. `group` tiles of tokens use the same weights
before the next weights come, so that both stay in the L2 cache."""

TOGETHER = 8
"""Neighbouring columns of a product that one row of four threads holds. Rows of the gate and of up alternate in groups
of this size."""

WANTED: Mapping[int, float] = {3: 0.8, 4: 0.9}
"""By token bucket: the least useful share of a launch's multiplications. The rest pads tiles of `block_m`, or belongs
to idle multiprocessors in the last round. Below it, cuBLAS and silu_and_mul were faster for most numbers of tokens.
Up to 256 tokens the weights have to be read in any case, so idle multiprocessors cost less."""


@triton.jit(do_not_specialize=["tokens"])
def many_rows(  # type: ignore[no-untyped-def]
    x, weight, bias, out, tokens, outputs, inputs,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr, TOGETHER: tl.constexpr,
    PROGRAMS: tl.constexpr, HAS_BIAS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out [tokens, outputs] = silu(x gate^T) * (x up^T). Program i takes tiles i, i + PROGRAMS, and so on.

    Descriptors: x [tokens, inputs], weight [outputs / TOGETHER, 2, TOGETHER, inputs], out [tokens, outputs].
    """
    wait(PDL)
    release(PDL)
    rows, columns = tl.cdiv(tokens, BLOCK_M), tl.cdiv(outputs, BLOCK_N)
    for tile in tl.range(tl.program_id(0), rows * columns, PROGRAMS, flatten=True):
        row, column = tile_at(tile, rows, columns, BLOCK_M, BLOCK_N, GROUP)
        both = tl.zeros([BLOCK_M, 2 * BLOCK_N], dtype=tl.float32)
        for k in range(0, tl.cdiv(inputs, BLOCK_K)):
            # loads beyond the ends of x and weight give zeros
            w = weight.load([column // TOGETHER, 0, 0, k * BLOCK_K]).reshape(2 * BLOCK_N, BLOCK_K)
            both = tl.dot(x.load([row, k * BLOCK_K]), w.T, both)
        gate, up = both.reshape(BLOCK_M, BLOCK_N // TOGETHER, 2, TOGETHER).permute(0, 1, 3, 2).split()
        gate, up = gate.reshape(BLOCK_M, BLOCK_N), up.reshape(BLOCK_M, BLOCK_N)
        if HAS_BIAS:
            at = column + tl.arange(0, BLOCK_N)
            gate += tl.load(bias + at, mask=at < outputs, other=0.0).to(tl.float32)[None, :]
            up += tl.load(bias + outputs + at, mask=at < outputs, other=0.0).to(tl.float32)[None, :]
        out.store([row, column], linear_kernels.silu_and_mul(gate, up).to(out.dtype))


class ManyRows:
    """The op, bound to a device, sizes and a configuration. Calls that do not fit the tiles go to cuBLAS and
    silu_and_mul. The first call does not: it compiles the kernel at the start, so that no request waits for the
    compiler."""

    def __init__(self, context: OpContext, config: Mapping[str, Any]) -> None:
        sizes = known_sizes(context)
        if sizes is None:
            raise ValueError(f"{KERNEL} of {context.op} needs a shape with inputs and size, has {dict(context.shape)}")
        self._size, self._inputs = sizes
        self._block_m, self._block_n, self._block_k = (int(config[f"block_{axis}"]) for axis in "mnk")
        self._programs, self._least = processors(context), WANTED[context.bucket]
        self._activation: Op = silu_and_mul.make(replace(context, op="silu_and_mul", shape={"size": sizes.outputs}))
        self._weights: dict[int, TensorDescriptor] = {}
        self._first = True
        overlap = overlaps(context)
        self._launch = Bound(
            many_rows,
            **{"BLOCK_M": self._block_m, "BLOCK_N": self._block_n, "BLOCK_K": self._block_k},
            **{"GROUP": config["group"], "TOGETHER": TOGETHER, "PROGRAMS": self._programs, "PDL": overlap},
            **{"num_warps": config["warps"], "num_stages": config["stages"], "launch_pdl": overlap},
        )

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x [T, inputs], weight [2 size, inputs], the gate's rows first -> [T, size]."""
        tokens = x.shape[0]
        if not _aligned(x, weight) or not (self._first or self.wanted(tokens) >= self._least):
            apart: torch.Tensor = self._activation(F.linear(x, weight, bias))
            return apart
        self._first = False
        out = x.new_empty(tokens, self._size)
        self._launch.but(HAS_BIAS=bias is not None)(
            (min(self._tiles(tokens), self._programs),),
            Box(x, [tokens, self._inputs], [x.stride(0), 1], [self._block_m, self._block_k]),
            self._box_of(weight),
            weight if bias is None else bias,
            Box(out, [tokens, self._size], [self._size, 1], [self._block_m, self._block_n]),
            *(tokens, self._size, self._inputs),
        )
        return out

    def _tiles(self, tokens: int) -> int:
        return -(-tokens // self._block_m) * -(-self._size // self._block_n)

    def wanted(self, tokens: int) -> float:
        """Returns the share of a launch's multiplications that contribute to the op's results."""
        rounds = -(-self._tiles(tokens) // self._programs)
        return tokens * self._size / (rounds * self._programs * self._block_m * self._block_n)

    def _box_of(self, weight: torch.Tensor) -> TensorDescriptor:
        """Returns the descriptor that alternates gate and up. It is made once, because weights do not move."""
        address = weight.data_ptr()
        found = self._weights.get(address)
        if found is None:
            inputs = self._inputs
            found = self._weights[address] = TensorDescriptor(
                weight,
                [self._size // TOGETHER, 2, TOGETHER, inputs],
                [TOGETHER * inputs, self._size * inputs, inputs, 1],
                [self._block_n // TOGETHER, 2, TOGETHER, self._block_k],
            )
        return found


def _aligned(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """True if TMA can read x and weight in place. Rows of x need not be adjacent."""
    apart = x.stride(0) * x.element_size()
    return not (x.data_ptr() | weight.data_ptr() | apart) % TMA_ALIGNED and x.stride(0) >= x.shape[1]


def make_with(context: OpContext, config: Mapping[str, Any]) -> ManyRows:
    """The op in the configuration `config`."""
    return ManyRows(context, {**DEFAULT, **config})


def make(context: OpContext) -> ManyRows:
    """The op in the fastest measured configuration, or in the default one."""
    return make_with(context, tuned.choose(KERNEL, context, DEFAULT))


def candidates(context: OpContext) -> Iterator[dict[str, Any]]:
    """Configurations worth timing. No other tiles were faster on an H200."""
    for stages in (3, 4):
        yield {**DEFAULT, "stages": stages}
