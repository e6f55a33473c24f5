"""Rows through the slots of `shared`: the parts of kernels and of launches that one_shot and two_shot share.

A rank writes rows into the memory of others. A receiver looks at its own memory until no element is EMPTY, takes the
rows, and makes their places EMPTY again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from llmcore.api import OpContext
from llmcore.layers import DTYPES, Op, Peers, over
from triton.language.extra.cuda import globaltimer

from llmcore_triton import add_rms_norm
from llmcore_triton.comm.shared import BITS, EMPTY, Shared, shared
from llmcore_triton.launch import INTERPRETED, Bound, overlaps, place
from llmcore_triton.rows import power, size

PROGRAMS = 2
"""Most programs per processor. A program waits for that of its number on other ranks alone. GPUs begin programs in the
order of their numbers, so it does not matter if large rows leave a processor registers for one program only."""


@triton.jit
def filled(bits, EMPTY: tl.constexpr):  # type: ignore[no-untyped-def]
    """The bits as they are sent: 0.0 in place of -0.0, which is EMPTY."""
    return tl.where(bits == tl.full(bits.shape, EMPTY, bits.dtype), tl.zeros_like(bits), bits)


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
    peer,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    ROOM: tl.constexpr,
):
    """Writes `bits`, which are `filled`, to elements `start` + `columns` of this rank's part of rank `peer`'s slot."""
    sender = tl.where(peer < RANK, RANK - 1, RANK)
    slot = slot_of(bits, buffers, peer, call, RANKS, ROOM)
    tl.store(slot + sender * ROOM + start + columns, bits, mask=keep)


@triton.jit
def send_all(  # type: ignore[no-untyped-def]
    bits,
    buffers,
    start,
    columns,
    keep,
    call,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    ROOM: tl.constexpr,
):
    """The same to every other rank."""
    for peer in tl.static_range(RANKS):
        if peer != RANK:
            send(bits, buffers, start, columns, keep, call, peer, RANK, RANKS, ROOM)


@triton.jit
def stop_after(waited, limit):  # type: ignore[no-untyped-def]
    """Ends all work of this process on the GPU with an error, if more than `limit` milliseconds have passed.

    `waited`: nanoseconds. The rank fails then, and with it its group.
    """
    if waited > limit.to(tl.int64) * 1000000:
        tl.inline_asm_elementwise("trap; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def receive(  # type: ignore[no-untyped-def]
    x,
    buffers,
    state,
    start,
    columns,
    keep,
    call,
    peer,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    ROOM: tl.constexpr,
    EMPTY: tl.constexpr,
    TIMED: tl.constexpr,
):
    """Waits for elements `start` + `columns` of rank `peer`'s rows, takes them, and makes their places EMPTY.

    `x`: any values of the type of the bits.
    """
    sender = tl.where(peer > RANK, peer - 1, peer)
    places = slot_of(x, buffers, RANK, call, RANKS, ROOM) + sender * ROOM + start + columns
    nothing = tl.full(x.shape, EMPTY, x.dtype)
    bits = tl.load(places, mask=keep, other=0, volatile=True)
    if TIMED:
        began = globaltimer()
    while tl.max((bits == nothing).to(tl.int32), axis=0) > 0:
        bits = tl.load(places, mask=keep, other=0, volatile=True)
        if TIMED:
            stop_after(globaltimer() - began, tl.load(state + 2))
    tl.store(places, nothing, mask=keep)
    return bits


@triton.jit
def add_up(  # type: ignore[no-untyped-def]
    value,
    buffers,
    state,
    start,
    columns,
    keep,
    call,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    ROOM: tl.constexpr,
    EMPTY: tl.constexpr,
    BITS: tl.constexpr,
    TIMED: tl.constexpr,
):
    """The bits, `filled`, of the sum of this rank's `value` and what all others have sent for it.

    It is made in f32 in rank order.
    """
    bits = value.to(BITS, bitcast=True)
    total = tl.zeros(value.shape, tl.float32)
    for peer in tl.static_range(RANKS):
        if peer == RANK:
            total += value.to(tl.float32)
        else:
            got = receive(bits, buffers, state, start, columns, keep, call, peer, RANK, RANKS, ROOM, EMPTY, TIMED)
            total += got.to(value.dtype, bitcast=True).to(tl.float32)
    return filled(total.to(value.dtype).to(BITS, bitcast=True), EMPTY)


@triton.jit
def finish(  # type: ignore[no-untyped-def]
    bits,
    residual,
    gain,
    out,
    row,
    columns,
    inside,
    residual_stride,
    out_stride,
    eps,
    SIZE: tl.constexpr,
    NORM: tl.constexpr,
):
    """Stores row `row` of a sum in out. With NORM, residual += the sum first, and out is its RMS norm.

    `bits`: those of the sum, in the type of out. The separate ops also round it before they add it.
    """
    summed = bits.to(out.dtype.element_ty, bitcast=True)
    if NORM:
        sums = residual + row * residual_stride + columns
        earlier = tl.load(sums, mask=inside, other=0.0).to(tl.float32)
        added = (earlier + summed.to(tl.float32)).to(summed.dtype)
        tl.store(sums, added, mask=inside)
        wide = added.to(tl.float32)
        result = (wide * tl.rsqrt(tl.sum(wide * wide, axis=0) / SIZE + eps) * gain).to(summed.dtype)
    else:
        result = summed
    tl.store(out + row * out_stride + columns, result, mask=inside)


@triton.jit
def end(state, call):  # type: ignore[no-untyped-def]
    """Counts this program. The last one of a call counts the call."""
    if tl.atomic_add(state + 1, 1, sem="relaxed") == tl.num_programs(0) - 1:
        tl.store(state + 1, 0)
        tl.store(state, call + 1)


class Sums:
    """Sums of rows over the ranks, with `kernel`, through the slots `of` one rank.

    `parts`: the parts of the kernel that run, all of which every rank must do. Tests do one after the other.
    """

    def __init__(
        self, of: Callable[[int], Shared], context: OpContext, kernel: Any, parts: Mapping[str, bool]
    ) -> None:
        self._of, self._size = of, size(context, "size")
        self._most = PROGRAMS * (context.device.processors or 1)
        pdl = overlaps(context)
        self._fixed = {"SIZE": self._size, **parts, "TIMED": not INTERPRETED, "PDL": pdl, "launch_pdl": pdl}
        self._sum = self._bound(kernel, power(self._size))

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, size] -> its sum over the ranks [T, size], in f32 in rank order, of x's type."""
        out = torch.empty_like(x)
        for some, into in self._fitting(x, out):
            self.summed(some, some, some, into, 0.0, norm=False)
        return out

    def add_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x, residual [T, size] -> (normed sum, sum). The results are x and residual, changed in place."""
        for some, sums in self._fitting(x, residual):
            self.summed(some, sums, weight, some, eps, norm=True)
        return x, residual

    def summed(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, eps: float, norm: bool
    ) -> None:
        """One call of the kernel for rows that fit into a slot. Without `norm`, residual and weight are not used."""
        kept = self._for(x)
        launch = self._sum.but(NORM=norm, **self._constants(x, kept))
        strides = (x.stride(0), residual.stride(0), out.stride(0))
        grid = (self._programs(len(x), kept),)
        launch(grid, x, residual, weight, out, kept.buffers, kept.state, len(x), *strides, eps)

    def _rows(self, kept: Shared) -> int:
        """Rows of a call that fit into a slot."""
        raise NotImplementedError

    def _programs(self, rows: int, kept: Shared) -> int:
        """Programs of a call."""
        raise NotImplementedError

    def _fitting(self, x: torch.Tensor, beside: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Pieces of the rows of both that fit into a slot; none of no rows."""
        rows = self._rows(self._for(x))
        firsts = range(0, len(x), rows)
        return [(x[first : first + rows], beside[first : first + rows]) for first in firsts]

    def _for(self, x: torch.Tensor) -> Shared:
        if not x.is_floating_point():
            raise TypeError(f"rows of floats can be sent, and not {x.dtype}; use kernel nccl or torch")
        return self._of(x.element_size())

    def _bound(self, kernel: Any, block: int) -> Bound:
        return Bound(kernel, BLOCK=block, **self._fixed, num_warps=min(max(block // 256, 1), 16))

    @staticmethod
    def _constants(x: torch.Tensor, kept: Shared) -> dict[str, Any]:
        element = x.element_size()
        bits = {torch.int16: tl.int16, torch.int32: tl.int32}[BITS[element]]
        return {"RANK": kept.rank, "RANKS": kept.ranks, "ROOM": kept.room, "EMPTY": EMPTY[element], "BITS": bits}


def made(context: OpContext, kernels: Callable[[Callable[[int], Shared]], Op], alone: Op | None) -> Op:
    """The op over the ranks of the context's peers. The first of a group's ops waits for the other ranks.

    `kernels`: the op from the slots for elements of some bytes. `alone`: the op for one rank; None: add_rms_norm.
    """

    def joined(peers: Peers) -> Op:
        def slots(element: int) -> Shared:
            return shared(peers, place(context), element)

        for element in sorted({DTYPES[context.dtype].itemsize, 4}):
            slots(element)  # now, because they cannot be made inside a capture
        return kernels(slots)

    return over(context, joined, alone or add_rms_norm.make(context))
