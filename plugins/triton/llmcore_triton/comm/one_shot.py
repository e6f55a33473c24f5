"""Sums and gathers over the GPUs of a host, in one launch: each rank writes its rows into the memory of all others.

The ranks need no barrier (see `slots`). So a call takes one trip over the link. At two ranks the bytes are the fewest
that a sum can move; with more ranks, kernel two_shot moves fewer. Sums are made in f32 in rank order, so all ranks
have the same bits in every batch.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from llmcore.api import OpContext
from llmcore.layers import Op

from llmcore_triton.comm.shared import Shared
from llmcore_triton.comm.slots import Sums, add_up, end, filled, finish, made, receive, send_all
from llmcore_triton.launch import release, wait
from llmcore_triton.rows import power

PIECE = 4096
"""Most columns of a program that gathers."""


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
    TIMED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Sums x [n_rows, SIZE] over the ranks into out, as `finish` stores it."""
    columns = tl.arange(0, BLOCK)
    inside = columns < SIZE
    gain = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32) if NORM else 0.0
    wait(PDL)
    release(PDL)
    call = tl.load(state, volatile=True)
    if SEND:
        for row in range(tl.program_id(0), n_rows, tl.num_programs(0)):
            value = tl.load(x + row * x_stride + columns, mask=inside, other=0.0)
            bits = filled(value.to(BITS, bitcast=True), EMPTY)
            send_all(bits, buffers, row * SIZE, columns, inside, call, RANK, RANKS, ROOM)
    if RECEIVE:
        for row in range(tl.program_id(0), n_rows, tl.num_programs(0)):
            value = tl.load(x + row * x_stride + columns, mask=inside, other=0.0)
            bits = add_up(
                value, buffers, state, row * SIZE, columns, inside, call, RANK, RANKS, ROOM, EMPTY, BITS, TIMED
            )
            finish(bits, residual, gain, out, row, columns, inside, residual_stride, out_stride, eps, SIZE, NORM)
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
    TIMED: tl.constexpr,
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
            bits = filled(value.to(BITS, bitcast=True), EMPTY)
            send_all(bits, buffers, row * SIZE, columns, inside, call, RANK, RANKS, ROOM)
    if RECEIVE:
        for unit in range(tl.program_id(0), n_rows * PIECES, tl.num_programs(0)):
            columns = (unit % PIECES) * BLOCK + tl.arange(0, BLOCK)
            inside, row = columns < SIZE, unit // PIECES
            own = tl.load(x + row * x_stride + columns, mask=inside, other=0.0)
            bits, start = own.to(BITS, bitcast=True), row * SIZE
            for peer in tl.static_range(RANKS):
                value = own
                if peer != RANK:
                    got = receive(
                        bits, buffers, state, start, columns, inside, call, peer, RANK, RANKS, ROOM, EMPTY, TIMED
                    )
                    value = got.to(own.dtype, bitcast=True)
                tl.store(out + peer * part_stride + row * out_stride + columns, value, mask=inside)
        end(state, call)


class OneShot(Sums):
    """The kernels over the slots `of` one rank."""

    def __init__(
        self, of: Callable[[int], Shared], context: OpContext, *, send: bool = True, receive: bool = True
    ) -> None:
        super().__init__(of, context, sum_rows, {"SEND": send, "RECEIVE": receive})
        piece = min(power(self._size), PIECE)
        self._gather = self._bound(gather_rows, piece)
        self._pieces = -(-self._size // piece)

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

    def _gathered(self, x: torch.Tensor, out: torch.Tensor, row: int, part: int) -> None:
        kept = self._for(x)
        launch = self._gather.but(**self._constants(x, kept))
        rows = self._rows(kept)
        for first in range(0, len(x), rows):
            some, into = x[first : first + rows], out[..., first : first + rows, :]
            grid = (min(len(some) * self._pieces, self._most),)
            launch(grid, some, into, kept.buffers, kept.state, len(some), some.stride(0), row, part)

    def _rows(self, kept: Shared) -> int:
        return kept.room // self._size

    def _programs(self, rows: int, kept: Shared) -> int:
        return min(rows, self._most)


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
    return made(context, lambda slots: partial(method, OneShot(slots, context)), alone)
