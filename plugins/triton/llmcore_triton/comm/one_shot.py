"""Sums and gathers over the GPUs of a host, in one launch: each rank writes its rows into the memory of all others.

The ranks need no barrier. A receiver looks at its own memory until no element is EMPTY (see `shared`), takes the rows,
and makes their places EMPTY again. So a call takes one trip over the link. At two ranks the bytes are the fewest that
a sum can move; with more ranks, kernel nccl moves fewer for many tokens. Sums are made in f32 in rank order, so all
ranks have the same bits in every batch.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from llmcore.api import OpContext
from llmcore.layers import DTYPES, Op, Peers, over
from triton.language.extra.cuda import globaltimer

from llmcore_triton import add_rms_norm
from llmcore_triton.comm.shared import BITS, EMPTY, Shared, shared
from llmcore_triton.launch import INTERPRETED, Bound, overlaps, place, release, wait
from llmcore_triton.rows import power, size

PATIENCE = 20_000_000_000
"""Nanoseconds that a program waits for rows. Then it ends the process's work on the GPU with an error (trap): the rank
fails, and with it its group."""

PIECE = 4096
"""Most columns of a program that gathers."""

PROGRAMS = 2
"""Most programs per processor. All are on the GPU at once, so none waits for rows that another has yet to send."""


@triton.jit
def slot_of(x, buffers, rank, call, RANKS: tl.constexpr, ROOM: tl.constexpr):  # type: ignore[no-untyped-def]
    """A pointer to elements of x's type: the slot of this call on rank `rank`. It is a multiple of 16 bytes."""
    slots = tl.load(buffers + rank).to(tl.pointer_type(x.dtype))
    return tl.multiple_of(slots, 16) + (call % 2) * ((RANKS - 1) * ROOM)


@triton.jit
def send(  # type: ignore[no-untyped-def]
    bits,
    buffers,
    start,
    columns,
    keep,
    call,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    ROOM: tl.constexpr,
    EMPTY: tl.constexpr,
):
    """Writes elements `start` + `columns` of this rank's rows into every other rank's slot of this call."""
    bits = tl.where(bits == tl.full(bits.shape, EMPTY, bits.dtype), tl.zeros_like(bits), bits)
    for peer in tl.static_range(RANKS):
        if peer != RANK:
            sender: tl.constexpr = RANK - 1 if peer < RANK else RANK
            slot = slot_of(bits, buffers, peer, call, RANKS, ROOM)
            tl.store(slot + sender * ROOM + start + columns, bits, mask=keep)


@triton.jit
def stop_after(waited, limit):  # type: ignore[no-untyped-def]
    """Ends all work of this process on the GPU with an error, if more than `limit` nanoseconds have passed."""
    if waited > limit:
        tl.inline_asm_elementwise("trap; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def receive(  # type: ignore[no-untyped-def]
    x,
    buffers,
    start,
    columns,
    keep,
    call,
    peer: tl.constexpr,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    ROOM: tl.constexpr,
    EMPTY: tl.constexpr,
    LIMIT: tl.constexpr,
):
    """Waits for elements `start` + `columns` of rank `peer`'s rows, takes them, and makes their places EMPTY.

    `x`: any values of the type of the bits.
    """
    sender: tl.constexpr = peer - 1 if peer > RANK else peer
    places = slot_of(x, buffers, RANK, call, RANKS, ROOM) + sender * ROOM + start + columns
    nothing = tl.full(x.shape, EMPTY, x.dtype)
    bits = tl.load(places, mask=keep, other=0, volatile=True)
    if LIMIT > 0:
        began = globaltimer()
    while tl.max((bits == nothing).to(tl.int32), axis=0) > 0:
        bits = tl.load(places, mask=keep, other=0, volatile=True)
        if LIMIT > 0:
            stop_after(globaltimer() - began, LIMIT)
    tl.store(places, nothing, mask=keep)
    return bits


@triton.jit
def end(state, call):  # type: ignore[no-untyped-def]
    """Counts this program. The last one of a call counts the call."""
    if tl.atomic_add(state + 1, 1, sem="relaxed") == tl.num_programs(0) - 1:
        tl.store(state + 1, 0)
        tl.store(state, call + 1)


@triton.jit(do_not_specialize=["n_rows"])
def sum_rows(  # type: ignore[no-untyped-def]
    x,
    residual,
    weight,
    out,
    buffers,
    state,
    n_rows,
    x_stride,
    residual_stride,
    out_stride,
    eps,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    ROOM: tl.constexpr,
    EMPTY: tl.constexpr,
    BITS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    NORM: tl.constexpr,
    SEND: tl.constexpr,
    RECEIVE: tl.constexpr,
    LIMIT: tl.constexpr,
    PDL: tl.constexpr,
):
    """Sums x [n_rows, SIZE] over the ranks into out. With NORM, residual += the sum first, and out is its RMS norm.

    The sum is rounded to x's type before it is added, as the separate ops do. SEND and RECEIVE: the halves of the
    kernel, both of which every rank must do; tests do one after the other.
    """
    columns = tl.arange(0, BLOCK)
    inside = columns < SIZE
    gain = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32) if NORM else 0.0
    wait(PDL)
    release(PDL)
    call = tl.load(state, volatile=True)
    if SEND:
        for row in range(tl.program_id(0), n_rows, tl.num_programs(0)):
            value = tl.load(x + row * x_stride + columns, mask=inside, other=0.0)
            start = row * SIZE
            send(value.to(BITS, bitcast=True), buffers, start, columns, inside, call, RANK, RANKS, ROOM, EMPTY)
    if RECEIVE:
        for row in range(tl.program_id(0), n_rows, tl.num_programs(0)):
            value = tl.load(x + row * x_stride + columns, mask=inside, other=0.0)
            start = row * SIZE
            bits = value.to(BITS, bitcast=True)
            total = tl.zeros([BLOCK], tl.float32)
            for peer in tl.static_range(RANKS):
                if peer == RANK:
                    total += value.to(tl.float32)
                else:
                    got = receive(bits, buffers, start, columns, inside, call, peer, RANK, RANKS, ROOM, EMPTY, LIMIT)
                    total += got.to(value.dtype, bitcast=True).to(tl.float32)
            summed = total.to(value.dtype)
            if NORM:
                sums = residual + row * residual_stride + columns
                earlier = tl.load(sums, mask=inside, other=0.0).to(tl.float32)
                summed = (earlier + summed.to(tl.float32)).to(value.dtype)
                tl.store(sums, summed, mask=inside)
                wide = summed.to(tl.float32)
                summed = (wide * tl.rsqrt(tl.sum(wide * wide, axis=0) / SIZE + eps) * gain).to(value.dtype)
            tl.store(out + row * out_stride + columns, summed, mask=inside)
        end(state, call)


@triton.jit(do_not_specialize=["n_rows"])
def gather_rows(  # type: ignore[no-untyped-def]
    x,
    out,
    buffers,
    state,
    n_rows,
    x_stride,
    out_stride,
    part_stride,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    ROOM: tl.constexpr,
    EMPTY: tl.constexpr,
    BITS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    SEND: tl.constexpr,
    RECEIVE: tl.constexpr,
    LIMIT: tl.constexpr,
    PDL: tl.constexpr,
):
    """Copies x [n_rows, SIZE] of every rank to out: rank r's row i begins at r part_stride + i out_stride."""
    PIECES: tl.constexpr = (SIZE + BLOCK - 1) // BLOCK
    wait(PDL)
    release(PDL)
    call = tl.load(state, volatile=True)
    if SEND:
        for unit in range(tl.program_id(0), n_rows * PIECES, tl.num_programs(0)):
            columns = (unit % PIECES) * BLOCK + tl.arange(0, BLOCK)
            inside, row = columns < SIZE, unit // PIECES
            value = tl.load(x + row * x_stride + columns, mask=inside, other=0.0)
            bits = value.to(BITS, bitcast=True)
            send(bits, buffers, row * SIZE, columns, inside, call, RANK, RANKS, ROOM, EMPTY)
    if RECEIVE:
        for unit in range(tl.program_id(0), n_rows * PIECES, tl.num_programs(0)):
            columns = (unit % PIECES) * BLOCK + tl.arange(0, BLOCK)
            inside, row = columns < SIZE, unit // PIECES
            own = tl.load(x + row * x_stride + columns, mask=inside, other=0.0)
            bits = own.to(BITS, bitcast=True)
            for peer in tl.static_range(RANKS):
                value = own
                if peer != RANK:
                    got = receive(
                        bits, buffers, row * SIZE, columns, inside, call, peer, RANK, RANKS, ROOM, EMPTY, LIMIT
                    )
                    value = got.to(own.dtype, bitcast=True)
                tl.store(out + peer * part_stride + row * out_stride + columns, value, mask=inside)
        end(state, call)


class OneShot:
    """The kernels over the slots `of` one rank. `processors`: those of its GPU."""

    def __init__(
        self, of: Callable[[int], Shared], context: OpContext, *, send: bool = True, receive: bool = True
    ) -> None:
        self._of, self._size = of, size(context, "size")
        self._most = PROGRAMS * (context.device.processors or 1)
        pdl = overlaps(context)
        block = power(self._size)
        halves = {"SEND": send, "RECEIVE": receive, "LIMIT": 0 if INTERPRETED else PATIENCE}
        fixed: dict[str, Any] = {"SIZE": self._size, **halves, "PDL": pdl, "launch_pdl": pdl}
        self._sum = Bound(sum_rows, BLOCK=block, **fixed, num_warps=min(max(block // 256, 1), 16))
        piece = min(block, PIECE)
        self._gather = Bound(gather_rows, BLOCK=piece, **fixed, num_warps=min(max(piece // 256, 1), 16))
        self._pieces = -(-self._size // piece)

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, size] -> its sum over the ranks [T, size], in f32 in rank order, of x's type."""
        out = torch.empty_like(x)
        for some, into in self._fitting(x, out):
            self._summed(some, some, some, into, 0.0, NORM=False)
        return out

    def add_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x, residual [T, size] -> (normed sum, sum). The results are x and residual, changed in place."""
        for some, sums in self._fitting(x, residual):
            self._summed(some, sums, weight, some, eps, NORM=True)
        return x, residual

    def stacked(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, size] of a float type -> [ranks, T, size]."""
        out = x.new_empty(self._for(x).ranks, *x.shape)
        self._gathered(x, out, out.stride(1), out.stride(0))
        return out

    def joined(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, size] of a float type -> [T, ranks size]."""
        out = x.new_empty(x.shape[0], self._for(x).ranks * self._size)
        self._gathered(x, out, out.stride(0), self._size)
        return out

    def _summed(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, eps: float, NORM: bool
    ) -> None:
        kept = self._for(x)
        launch = self._sum.but(NORM=NORM, **self._constants(x, kept))
        grid, strides = (min(len(x), self._most),), (x.stride(0), residual.stride(0), out.stride(0))
        launch(grid, x, residual, weight, out, kept.buffers, kept.state, len(x), *strides, eps)

    def _gathered(self, x: torch.Tensor, out: torch.Tensor, row: int, part: int) -> None:
        kept = self._for(x)
        launch = self._gather.but(**self._constants(x, kept))
        rows = kept.room // self._size
        for first in range(0, len(x), rows):
            some, into = x[first : first + rows], out[..., first : first + rows, :]
            grid = (min(len(some) * self._pieces, self._most),)
            launch(grid, some, into, kept.buffers, kept.state, len(some), some.stride(0), row, part)

    def _fitting(self, x: torch.Tensor, beside: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Pieces of the rows of both that fit into a slot; none of no rows."""
        rows = self._for(x).room // self._size
        firsts = range(0, len(x), rows)
        return [(x[first : first + rows], beside[first : first + rows]) for first in firsts]

    def _for(self, x: torch.Tensor) -> Shared:
        if not x.is_floating_point():
            raise TypeError(f"kernel one_shot sends rows of floats, not {x.dtype}")
        return self._of(x.element_size())

    @staticmethod
    def _constants(x: torch.Tensor, kept: Shared) -> dict[str, Any]:
        element = x.element_size()
        bits = {torch.int16: tl.int16, torch.int32: tl.int32}[BITS[element]]
        return {"RANK": kept.rank, "RANKS": kept.ranks, "ROOM": kept.room, "EMPTY": EMPTY[element], "BITS": bits}


_OPS: dict[str, tuple[Callable[..., Any], Op | None]] = {
    "comm.all_reduce": (OneShot.sum, lambda x: x),
    "comm.all_gather": (OneShot.joined, lambda x: x),
    "comm.exchange": (OneShot.stacked, lambda x: x.unsqueeze(0)),
    "reduce_add_rms_norm": (OneShot.add_norm, None),
}
"""Op -> the method, and the op for one rank; None: that of add_rms_norm."""


def make(context: OpContext) -> Op:
    """The op over the ranks of the context's peers. The first of a group's ops waits for the other ranks."""
    method, alone = _OPS[context.op]

    def joined(peers: Peers) -> Op:
        slots = partial(shared, peers, place(context))
        for element in sorted({DTYPES[context.dtype].itemsize, 4}):
            slots(element)  # now, because they cannot be made inside a capture
        return partial(method, OneShot(slots, context))

    return over(context, joined, alone or add_rms_norm.make(context))
