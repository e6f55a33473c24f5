"""Sums over the GPUs of a host, in one launch and two trips: each rank sums a share of the rows, and sends the sums.

Row i belongs to rank i % ranks. A rank sends each row to its owner. The owner sums the rows of all ranks, and sends
the sum to all others. At n ranks a rank so sends 2 (n - 1) / n times the bytes of the call, and n - 1 times with
kernel one_shot. At two ranks these are equal. The residual is the same on every rank, so each one adds and norms all
rows itself. Normed rows and residuals need not be sent.

**The bits** are those of one_shot, so the calls of a model may change between the two kernels. In both, `add_up` makes
the sum and rounds it to x's type, before `finish` works on it. Here it is sent in between, which changes no bit.

**Slots.** A call needs one slot. Rows for the owner are in the first half of a sender's part, sums in the second.
Calls take turns with the slots (`specs.comm.SLOTS`), whichever kernel they use. Both kernels receive exactly the
places that they send. So every place is EMPTY between calls, and each kernel may divide a slot as it likes.

**No deadlock.** The programs of one number have the same rows on all ranks, and wait for each other alone. In each
turn such a program waits for nothing but what the others send in the turns before.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import triton
import triton.language as tl
from llmcore.api import OpContext
from llmcore.layers import Op

from llmcore_triton.comm.shared import Shared
from llmcore_triton.comm.slots import Sums, add_up, end, filled, finish, made, receive, send, send_all
from llmcore_triton.launch import release, wait


@triton.jit
def row_at(turn, n_rows, RANKS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The row of this program in turn `turn`, and n_rows or more if it has none.

    The owners of its rows take turns too, because the owner has the most to do for a row.
    """
    program, programs = tl.program_id(0), tl.num_programs(0)
    lane = program % RANKS
    return tl.where(turn < 0, n_rows, turn * programs + program - lane + (lane + turn) % RANKS)


@triton.jit(do_not_specialize=["n_rows"])
def sum_shares(  # type: ignore[no-untyped-def]
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
    SUM: tl.constexpr,
    TAKE: tl.constexpr,
    TIMED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Sums x [n_rows, SIZE] over the ranks into out, as `finish` stores it.

    The number of programs is a multiple of RANKS. In each turn a program sends a row, sums that of the turn before,
    and takes the sum of the turn before that. So rows are on their way while others are summed.
    """
    SUMS: tl.constexpr = ROOM // 2
    columns = tl.arange(0, BLOCK)
    inside = columns < SIZE
    gain = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32) if NORM else 0.0
    wait(PDL)
    release(PDL)
    call = tl.load(state, volatile=True)
    for turn in range(0, tl.cdiv(n_rows, tl.num_programs(0)) + 2):
        if SEND:
            row = row_at(turn, n_rows, RANKS)
            owner = row % RANKS
            if (row < n_rows) & (owner != RANK):
                value = tl.load(x + row * x_stride + columns, mask=inside, other=0.0)
                bits = filled(value.to(BITS, bitcast=True), EMPTY)
                send(bits, buffers, row // RANKS * SIZE, columns, inside, call, owner, RANK, RANKS, ROOM)
        if SUM:
            row = row_at(turn - 1, n_rows, RANKS)
            if (row < n_rows) & (row % RANKS == RANK):
                value = tl.load(x + row * x_stride + columns, mask=inside, other=0.0)
                start = row // RANKS * SIZE
                bits = add_up(
                    value, buffers, state, start, columns, inside, call, RANK, RANKS, ROOM, EMPTY, BITS, TIMED
                )
                send_all(bits, buffers, SUMS + start, columns, inside, call, RANK, RANKS, ROOM)
                finish(bits, residual, gain, out, row, columns, inside, residual_stride, out_stride, eps, SIZE, NORM)
        if TAKE:
            row = row_at(turn - 2, n_rows, RANKS)
            owner = row % RANKS
            if (row < n_rows) & (owner != RANK):
                start = SUMS + row // RANKS * SIZE
                like = tl.zeros([BLOCK], BITS)
                bits = receive(
                    like, buffers, state, start, columns, inside, call, owner, RANK, RANKS, ROOM, EMPTY, TIMED
                )
                finish(bits, residual, gain, out, row, columns, inside, residual_stride, out_stride, eps, SIZE, NORM)
    if TAKE:
        end(state, call)


class TwoShot(Sums):
    """The kernel over the slots `of` one rank."""

    def __init__(
        self,
        of: Callable[[int], Shared],
        context: OpContext,
        *,
        send: bool = True,
        sum: bool = True,
        take: bool = True,
    ) -> None:
        super().__init__(of, context, sum_shares, {"SEND": send, "SUM": sum, "TAKE": take})

    def _rows(self, kept: Shared) -> int:
        return kept.room // 2 // self._size * kept.ranks

    def _programs(self, rows: int, kept: Shared) -> int:
        return min(-(-rows // kept.ranks), max(self._most // kept.ranks, 1)) * kept.ranks


_OPS: dict[str, tuple[Callable[..., Any], Op | None]] = {
    "comm.all_reduce": (TwoShot.sum, lambda x: x),
    "reduce_add_rms_norm": (TwoShot.add_norm, None),
}
"""Op -> the method, and the op for one rank; None: that of add_rms_norm."""


def make(context: OpContext) -> Op:
    """The op over the ranks of the context's peers. The first of a group's ops waits for the other ranks."""
    method, alone = _OPS[context.op]
    return made(context, lambda slots: partial(method, TwoShot(slots, context)), alone)
