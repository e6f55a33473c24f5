"""linear.w8a8 and linear.fp8_block, kernel many_rows: more than 16 tokens, with Hopper's instructions.

The scales of rows are applied to finished sums. The scales of groups are applied to the sum of each step, which is as
long as a group: the tensor cores' own accumulators keep about 14 bits of sums of float8.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from llmcore.api import OpContext
from llmcore.layers import DTYPES
from triton.tools.tensor_descriptor import TensorDescriptor

from llmcore_triton import tuned
from llmcore_triton.launch import Bound, Box, overlaps, place, release, wait
from llmcore_triton.linear_kernels import scaled, tile_at
from llmcore_triton.linear_shapes import BARRIERS, buffer, known_sizes, power_of_two, processors, shared_bytes
from llmcore_triton.quantized import codes_cublas
from llmcore_triton.quantized.blocks import Packs, group_of, spread_of
from llmcore_triton.quantized.codes_finish import MOST, Finish

KERNEL = "many_rows"

DEFAULT: dict[str, Any] = {
    **{"block_m": 128, "block_n": 128, "block_k": 128, "warps": 8, "stages": 4, "group": 16},
    **{"per_processor": 1, "parts": MOST},
}
"""As for `linear_silu_and_mul`, and:
- `per_processor`: programs on each multiprocessor
- `stages`: at most; there are fewer if shared memory ends
- `parts`: the most programs that share a tile"""

_FEW_TOKENS = 3
"""The last bucket, up to 256 tokens, for which there are fewer tiles than multiprocessors."""

_LAUNCH = 160 * 1024
"""The bytes that a multiprocessor loads in 1.5 us, while the launch that adds parts starts."""


@triton.jit(do_not_specialize=["tokens"])
def many_rows(  # type: ignore[no-untyped-def]
    x, weight, x_scale, scale, bias, out, tokens, outputs, inputs, scale_stride,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, TURN: tl.constexpr, PROGRAMS: tl.constexpr,
    GROUP: tl.constexpr, PDL: tl.constexpr, HAS_BIAS: tl.constexpr, SPREAD: tl.constexpr,
):  # fmt: skip
    """out [tokens, outputs] = x weight^T. Program i takes tiles i, i + PROGRAMS, and so on.

    Descriptors: x [tokens, inputs], weight [outputs, inputs], out [tokens, outputs]. GROUP is 0, or BLOCK_K. SPREAD
    and the scales are those of small_rows in linear_kernels.
    """
    wait(PDL)
    release(PDL)
    rows, columns = tl.cdiv(tokens, BLOCK_M), tl.cdiv(outputs, BLOCK_N)
    for tile in tl.range(tl.program_id(0), rows * columns, PROGRAMS, flatten=True):
        row, column = tile_at(tile, rows, columns, BLOCK_M, BLOCK_N, TURN)
        lines, at = row + tl.arange(0, BLOCK_M), column + tl.arange(0, BLOCK_N)
        acc = _sums(x, weight, x_scale, scale, row, column, 0, tl.cdiv(inputs, BLOCK_K), tokens, outputs, inputs,
                    scale_stride, BLOCK_M, BLOCK_N, BLOCK_K, GROUP, SPREAD)  # fmt: skip
        y = acc.to(tl.float32)
        if not GROUP:
            y *= tl.load(x_scale + lines * scale_stride, mask=lines < tokens, other=0.0)[:, None]
            y *= tl.load(scale + at, mask=at < outputs, other=0.0)[None, :]
        if HAS_BIAS:
            y += tl.load(bias + at, mask=at < outputs, other=0.0).to(tl.float32)[None, :]
        out.store([row, column], y.to(out.dtype))


@triton.jit(do_not_specialize=["tokens", "parts"])
def part_of_rows(  # type: ignore[no-untyped-def]
    x, weight, x_scale, scale, sums, tokens, outputs, inputs, scale_stride, parts,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, TURN: tl.constexpr, GROUP: tl.constexpr,
    PDL: tl.constexpr, SPREAD: tl.constexpr,
):  # fmt: skip
    """The sums of products of a tile, over one of `parts` parts of the inputs. Each program has one.

    As many_rows, with a descriptor `sums` [parts * tokens, outputs] in place of out. There tokens are rounded up to
    whole tiles. Scales of rows are not applied.
    """
    wait(PDL)
    release(PDL)
    rows, columns = tl.cdiv(tokens, BLOCK_M), tl.cdiv(outputs, BLOCK_N)
    # programs of one part come one after another, because they read the same inputs
    part = tl.program_id(0) // (rows * columns)
    row, column = tile_at(tl.program_id(0) % (rows * columns), rows, columns, BLOCK_M, BLOCK_N, TURN)
    steps = tl.cdiv(inputs, BLOCK_K)
    first, end = part * steps // parts, (part + 1) * steps // parts
    # if the loop could be empty, ptxas would make each of its multiplications wait for the one before
    tl.assume(first < end)
    acc = _sums(x, weight, x_scale, scale, row, column, first, end, tokens, outputs, inputs, scale_stride,
                BLOCK_M, BLOCK_N, BLOCK_K, GROUP, SPREAD)  # fmt: skip
    # as bits of the other type, because the compiler gives results of the loop themselves no memory that the loop had
    if acc.dtype == tl.int32:
        bits = acc.to(tl.float32, bitcast=True)
    else:
        bits = acc.to(tl.int32, bitcast=True)
    sums.store([part * rows * BLOCK_M + row, column], bits)


@triton.jit
def _sums(  # type: ignore[no-untyped-def]
    x, weight, x_scale, scale, row, column, first, end, tokens, outputs, inputs, scale_stride,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr, SPREAD: tl.constexpr,
):  # fmt: skip
    """Returns the sums of products of a tile over the steps from `first` until before `end`."""
    lines, at = row + tl.arange(0, BLOCK_M), column + tl.arange(0, BLOCK_N)
    sums: tl.constexpr = tl.int32 if x.dtype == tl.int8 else tl.float32
    acc = tl.zeros([BLOCK_M, BLOCK_N], dtype=sums)
    for k in range(first, end):
        # loads beyond the ends of x and weight give zeros
        xs, ws = x.load([row, k * BLOCK_K]), weight.load([column, k * BLOCK_K])
        if GROUP:
            by_x = tl.load(x_scale + lines * scale_stride + k, mask=lines < tokens, other=0.0)[:, None]
            if SPREAD > 1:
                by_w = tl.load(scale + column // SPREAD * (inputs // GROUP) + k)
            else:
                by_w = tl.load(scale + at * (inputs // GROUP) + k, mask=at < outputs, other=0.0)[None, :]
            acc += scaled(tl.dot(xs, ws.T), by_w, by_x, SPREAD)
        else:
            acc = tl.dot(xs, ws.T, acc, out_dtype=sums)
    return acc


class ManyRows(Packs):
    """The op, bound to a device, sizes and a configuration, for any number of tokens."""

    def __init__(self, context: OpContext, config: Mapping[str, Any]) -> None:
        super().__init__(context)
        sizes = known_sizes(context)
        if sizes is None:
            raise ValueError(f"{KERNEL} of {context.op} needs a shape with inputs and outputs, has none")
        self._outputs, self._inputs = sizes
        self._dtype, group = DTYPES[context.dtype], group_of(context)
        self._block_m, self._block_n = int(config["block_m"]), int(config["block_n"])
        self._block_k, self._per_processor = group or int(config["block_k"]), int(config["per_processor"])
        self._programs = processors(context) * self._per_processor
        self._weights: dict[int, TensorDescriptor] = {}
        self._parts: dict[int, int] = {}
        self._most, self._cublas = int(config["parts"]), codes_cublas.for_most(context)
        overlap = overlaps(context)
        fixed = {
            **{"BLOCK_M": self._block_m, "BLOCK_N": self._block_n, "BLOCK_K": self._block_k},
            **{"TURN": config["group"], "GROUP": group, "PDL": overlap},
            **{"num_warps": config["warps"], "launch_pdl": overlap},
        }
        stages = stages_of(context, config)
        self._launch = Bound(many_rows, PROGRAMS=self._programs, num_stages=stages[0], **fixed)
        self._part, self._finish = Bound(part_of_rows, num_stages=stages[1], **fixed), Finish(context, MOST, not group)
        # made here: a call may be captured into a CUDA graph, and must not own memory
        size = power_of_two(self._programs * self._block_m * self._block_n)
        self._sums = buffer(place(context), torch.float32, size)
        self._bits = self._sums.view(torch.int32)
        if context.shape["codes"] == "i8":
            self._sums, self._bits = self._bits, self._sums

    def __call__(
        self,
        x: torch.Tensor,
        x_scale: torch.Tensor,
        codes: torch.Tensor,
        scale: torch.Tensor,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """x [T, inputs], x_scale [T, groups], codes [outputs, inputs], scale [outputs, groups] or that of blocks of
        outputs -> [T, outputs]. Rows without groups have one scale."""
        tokens, outputs, inputs = len(x), self._outputs, self._inputs
        if self._cublas is not None and tokens > codes_cublas.MOST:
            return self._cublas(x, x_scale, codes, scale, bias)
        out = x.new_empty(tokens, outputs, dtype=self._dtype)
        rows = -(-tokens // self._block_m)
        tiles = rows * -(-outputs // self._block_n)
        parts = self._parts.get(tiles) or self._parts.setdefault(tiles, self.parts_of(tiles))
        spread, box = spread_of(codes, scale), [self._block_m, self._block_n]
        operands = (
            Box(x.contiguous(), [tokens, inputs], [inputs, 1], [self._block_m, self._block_k]),
            *(self._box_of(codes), x_scale, scale),
        )
        numbers = tokens, outputs, inputs, x_scale.stride(0)
        if parts == 1:
            self._launch.but(HAS_BIAS=bias is not None, SPREAD=spread)(
                (min(tiles, self._programs),),
                *(*operands, codes if bias is None else bias, Box(out, [tokens, outputs], [outputs, 1], box)),
                *numbers,
            )
            return out
        padded = rows * self._block_m
        self._part.but(SPREAD=spread)(
            (tiles * parts,), *operands, Box(self._bits, [parts * padded, outputs], [outputs, 1], box), *numbers, parts
        )
        self._finish(self._sums, x_scale, scale, bias, out, parts, padded)
        return out

    def parts_of(self, tiles: int) -> int:
        """Returns the number of programs that share a tile. It minimizes the bytes that pass a multiprocessor."""
        steps = -(-self._inputs // self._block_k)
        step = (self._block_m + self._block_n) * self._block_k
        sums = 4 * self._block_m * self._block_n

        def moved(parts: int) -> float:
            if parts == 1:
                return -(-tiles // self._programs) * steps * step
            back = parts * tiles / self._programs * sums
            return -(-steps // parts) * step + sums + back + _LAUNCH / self._per_processor

        return min(range(1, max(min(self._most, steps, self._programs // tiles), 1) + 1), key=moved)

    def _box_of(self, codes: torch.Tensor) -> TensorDescriptor:
        """Returns the weight's descriptor. It is made once, because weights do not move."""
        address = codes.data_ptr()
        found = self._weights.get(address)
        if found is None:
            block = [self._block_n, self._block_k]
            found = self._weights[address] = TensorDescriptor(codes, list(codes.shape), [self._inputs, 1], block)
        return found


def stages_of(context: OpContext, config: Mapping[str, Any]) -> tuple[int, int]:
    """Returns the stages that shared memory has room for: beside a tile of results, and if that takes their place."""
    m, n, k = (int(config[f"block_{axis}"]) for axis in "mnk")
    room = shared_bytes(context, config["per_processor"]) - BARRIERS
    beside, alone = (max(left // ((m + n) * k), 1) for left in (room - m * n * DTYPES[context.dtype].itemsize, room))
    return min(int(config["stages"]), beside), min(int(config["stages"]), alone)


def make_with(context: OpContext, config: Mapping[str, Any]) -> ManyRows:
    """The op in the configuration `config`."""
    return ManyRows(context, {**DEFAULT, **config})


def make(context: OpContext) -> ManyRows:
    """The op in the fastest measured configuration, or in the default one."""
    return make_with(context, tuned.choose(KERNEL, context, default(context)))


def default(context: OpContext) -> dict[str, Any]:
    """Returns the configuration for shapes that have not been measured."""
    if context.bucket > _FEW_TOKENS:
        return DEFAULT
    return {**DEFAULT, "stages": _STAGES, **({"block_n": 64, "warps": 4} if group_of(context) else {})}


_STAGES = 8
_NAMES = ("block_m", "block_n", "block_k", "warps", "stages", "per_processor", "parts")
_FEW = (
    *((128, 128, 128, 8, _STAGES, 1, 8), (128, 128, 128, 8, _STAGES, 1, 1), (64, 256, 128, 4, _STAGES, 1, 8)),
    *((128, 64, 128, 4, _STAGES, 1, 8), (64, 64, 256, 4, _STAGES, 1, 1), (128, 256, 128, 8, _STAGES, 1, 8)),
    *((256, 128, 128, 8, _STAGES, 1, 8), (128, 64, 128, 4, _STAGES, 2, 1)),
)
_FEW_INTEGERS = (
    *((64, 128, 128, 4, _STAGES, 2, 8), (64, 128, 128, 4, _STAGES, 2, 1), (64, 64, 128, 4, _STAGES, 2, 8)),
    *((64, 64, 256, 4, _STAGES, 1, 1), (128, 128, 128, 8, _STAGES, 2, 8), (128, 256, 128, 8, _STAGES, 1, 8)),
    *((128, 64, 256, 4, _STAGES, 2, 8), (128, 128, 256, 8, _STAGES, 1, 8)),
)
_FEW_GROUPS = (
    *((128, 64, 128, 4, _STAGES, 2, 8), (64, 128, 128, 4, _STAGES, 2, 8), (128, 128, 128, 8, _STAGES, 1, 8)),
    *((128, 128, 128, 8, _STAGES, 1, 1), (128, 128, 128, 8, _STAGES, 2, 8), (128, 64, 128, 8, _STAGES, 1, 8)),
    *((64, 64, 128, 4, _STAGES, 2, 8), (64, 128, 128, 4, _STAGES, 2, 1)),
)
_MANY = (
    *((128, 256, 128, 8, 3, 1, 8), (256, 128, 128, 8, 3, 1, 8), (128, 128, 128, 8, 4, 1, 8)),
    *((128, 128, 128, 8, _STAGES, 1, 8), (64, 256, 128, 4, 4, 1, 8), (128, 256, 64, 8, 5, 1, 8)),
)
_MANY_GROUPS = (
    *((128, 128, 128, 8, 4, 1, 8), (128, 128, 128, 8, _STAGES, 1, 8), (128, 128, 128, 8, 2, 2, 8)),
    *((128, 64, 128, 4, 3, 2, 8), (64, 128, 128, 4, 3, 2, 8), (64, 128, 128, 4, 2, 3, 8)),
)
"""The tiles to time, by _NAMES. Programs that multiply integers come in twos, because Triton lets each wait for every
product."""


def candidates(context: OpContext) -> Iterator[dict[str, Any]]:
    """Configurations worth timing."""
    few = context.bucket <= _FEW_TOKENS
    if group_of(context):
        tiles = _FEW_GROUPS if few else _MANY_GROUPS
    elif few and context.shape["codes"] == "i8":
        tiles = _FEW_INTEGERS
    else:
        tiles = _FEW if few else _MANY
    for tile in tiles:
        yield {**DEFAULT, **dict(zip(_NAMES, tile, strict=True))}
