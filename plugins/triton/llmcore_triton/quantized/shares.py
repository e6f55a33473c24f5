"""The division of a product of packed weights among programs.

Each program first takes whole tiles, every nth one. So programs that run at the same time read the same inputs and
weights, which the L2 cache holds. The steps of the tiles after those are cut into equal shares.
"""

from __future__ import annotations

import triton
import triton.language as tl

from llmcore_triton.linear_kernels import tile_at


@triton.jit
def share():  # type: ignore[no-untyped-def]
    """Returns the number of this program's share.

    A program waits for parts of later shares. GPUs begin programs in the order of their numbers, so later shares began
    before.
    """
    return tl.num_programs(0) - 1 - tl.program_id(0)


@triton.jit
def work_of(  # type: ignore[no-untyped-def]
    tokens, outputs, whole, steps, TOKENS: tl.constexpr, COLUMNS: tl.constexpr, K_STEPS: tl.constexpr
):
    """Returns what `turns` and `tile_of` take. Its last two are the first of this program's steps of shared tiles, and
    the one after the last.

    whole: the tiles that each program computes alone. steps: those of a share.
    """
    tiles = tl.cdiv(outputs, COLUMNS) * tl.cdiv(tokens, TOKENS) - whole * tl.num_programs(0)
    first = share() * steps
    return tokens, outputs, whole, first, tl.minimum(first + steps, tiles * K_STEPS)


@triton.jit
def turns(work, K_STEPS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns the first of this program's turns, and the one after the last. In each it computes a tile or a part.

    Turns with shared tiles have the numbers of those, and a program may have none. Before them come those with whole
    tiles.
    """
    _, _, whole, first, end = work
    shared = first // K_STEPS
    return shared - whole, tl.maximum(tl.cdiv(end, K_STEPS), shared)


@triton.jit
def tile_of(  # type: ignore[no-untyped-def]
    turn, work, TOKENS: tl.constexpr, COLUMNS: tl.constexpr, K_STEPS: tl.constexpr, GROUP: tl.constexpr
):
    """Returns the first token of a turn's tile, the tile's number among those of outputs, the first step, and the one
    after the last. GROUP: tiles of tokens that use the same weights one after another."""
    tokens, outputs, whole, first, end = work
    tile = whole * tl.num_programs(0) + turn
    k_first, k_end = tl.maximum(first - turn * K_STEPS, 0), tl.minimum(end - turn * K_STEPS, K_STEPS)
    before = first // K_STEPS - turn
    if before > 0:
        tile = (whole - before) * tl.num_programs(0) + share()
        k_first, k_end = 0, K_STEPS
    row, column = tile_at(tile, tl.cdiv(tokens, TOKENS), tl.cdiv(outputs, COLUMNS), TOKENS, 1, GROUP)
    return row, column, k_first, k_end


@triton.jit
def others_of(turn, steps, K_STEPS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns the number of later shares that have a part of the tile that this program begins in a turn."""
    return (turn * K_STEPS + K_STEPS - 1) // steps - share()
