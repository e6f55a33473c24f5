"""The GPU kernels of a mixture of experts for one token. Weights are read once, without tensor cores."""

from __future__ import annotations

import triton
import triton.language as tl

from llmcore_triton.launch import release, wait
from llmcore_triton.linear_kernels import silu_and_mul


@triton.jit
def _rows(there, k, inside, inputs, BLOCK_K: tl.constexpr, EVEN: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns a block of weights. Nothing is read twice."""
    columns = k * BLOCK_K + tl.arange(0, BLOCK_K)
    if EVEN:
        return tl.load(there + k * BLOCK_K, eviction_policy="evict_first")
    mask = inside[:, None] & (columns < inputs)[None, :]
    return tl.load(there + k * BLOCK_K, mask=mask, other=0.0, eviction_policy="evict_first")


@triton.jit
def _vector(  # type: ignore[no-untyped-def]
    x, k, inputs, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Returns a block of one token's row, repeated BLOCK_N times: it then has the weights' layout in registers, and
    does not pass through shared memory. EARLY: bypass the L1 cache, which may hold the previous step's data."""
    columns = tl.broadcast_to((k * BLOCK_K + tl.arange(0, BLOCK_K))[None, :], [BLOCK_N, BLOCK_K])
    modifier: tl.constexpr = ".cg" if EARLY else ""
    if EVEN:
        return tl.load(x + columns, cache_modifier=modifier).to(tl.float32)
    return tl.load(x + columns, mask=columns < inputs, other=0.0, cache_modifier=modifier).to(tl.float32)


@triton.jit
def _gate_up(  # type: ignore[no-untyped-def]
    x, there, up_there, inside, inputs,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Returns silu(gate) * up of x [inputs]: BLOCK_N outputs of each, whose weights are at `there`."""
    w, v = _rows(there, 0, inside, inputs, BLOCK_K, EVEN), _rows(up_there, 0, inside, inputs, BLOCK_K, EVEN)
    gate = tl.zeros([BLOCK_N, BLOCK_K], dtype=tl.float32)
    up = tl.zeros([BLOCK_N, BLOCK_K], dtype=tl.float32)
    # the next block loads while this one is multiplied; the last has no next one
    for k in range(1, tl.cdiv(inputs, BLOCK_K)):
        xs = _vector(x, k - 1, inputs, BLOCK_N, BLOCK_K, EVEN, EARLY)
        gate += w.to(tl.float32) * xs
        w = _rows(there, k, inside, inputs, BLOCK_K, EVEN)
        up += v.to(tl.float32) * xs
        v = _rows(up_there, k, inside, inputs, BLOCK_K, EVEN)
    xs = _vector(x, tl.cdiv(inputs, BLOCK_K) - 1, inputs, BLOCK_N, BLOCK_K, EVEN, EARLY)
    first, second = tl.sum(gate + w.to(tl.float32) * xs, axis=1), tl.sum(up + v.to(tl.float32) * xs, axis=1)
    return silu_and_mul(first, second)


@triton.jit
def gate_up_of_token(  # type: ignore[no-untyped-def]
    x, weight, shared, chosen, out, inner, width, inputs,
    TOP_K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN: tl.constexpr, SHARED: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """out [TOP_K inner + width] = silu(gate) * up of x [inputs], by the chosen experts and then, if SHARED, by the
    expert that every token sees.

    A program has BLOCK_N outputs. The first programs compute the shared expert. They do not wait, so they run while
    experts are chosen. This is safe. Two kernels run ahead, `router` and `select`. x comes from a kernel before them,
    and `router` releases the next one after its own `wait`. No other kernel uses `out` yet. The next kernel waits for
    all programs, so also for what the others of them wait for.
    """
    tile = tl.program_id(0)
    early = 0
    if SHARED:
        early = tl.cdiv(width, BLOCK_N)
    within = tl.arange(0, BLOCK_N)
    columns = tl.arange(0, BLOCK_K)[None, :]
    if tile < early:
        rows = tile * BLOCK_N + within
        inside = rows < width
        there = shared + (rows * inputs)[:, None] + columns
        y = _gate_up(x, there, there + width.to(tl.int64) * inputs, inside, inputs, BLOCK_N, BLOCK_K, EVEN, True)
        tl.store(out + TOP_K * inner + rows, y.to(out.dtype.element_ty), mask=inside)
    else:
        tiles = tl.cdiv(inner, BLOCK_N)
        choice = (tile - early) // tiles
        rows = (tile - early) % tiles * BLOCK_N + within
        inside = rows < inner
        wait(PDL)
        release(PDL)
        expert = tl.load(chosen + choice).to(tl.int64)
        there = weight + expert * 2 * inner * inputs + (rows * inputs)[:, None] + columns
        y = _gate_up(x, there, there + inner.to(tl.int64) * inputs, inside, inputs, BLOCK_N, BLOCK_K, EVEN, False)
        tl.store(out + choice * inner + rows, y.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _down(  # type: ignore[no-untyped-def]
    acc, x, there, share, inside, inputs, w_first,
    STEPS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Adds to acc [BLOCK_N, BLOCK_K] the products of x [inputs] times `share` with STEPS blocks of weights at `there`.
    EARLY: `w_first` is the first block."""
    for k in tl.static_range(STEPS):
        if EARLY and k == 0:
            w = w_first
        else:
            w = _rows(there, k, inside, inputs, BLOCK_K, EVEN)
        acc += w.to(tl.float32) * (_vector(x, k, inputs, BLOCK_N, BLOCK_K, EVEN, False) * share)
    return acc


@triton.jit
def down_of_token(  # type: ignore[no-untyped-def]
    x, weight, shared, chosen, weights, extra, out, outputs, inputs, width,
    TOP_K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STEPS: tl.constexpr,
    SHARED_STEPS: tl.constexpr, EVEN: tl.constexpr, EXTRA: tl.constexpr, EARLY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out [outputs]: the sum of three terms. First, over TOP_K choices: weights times x [choice, inputs] by the
    expert's down. Second, x [TOP_K inputs :], `width` elements, by the `shared` expert that every token sees. Third,
    extra.

    A program has BLOCK_N outputs of all of them. It takes STEPS blocks of inputs for each choice, and SHARED_STEPS
    blocks (0: none exists) for the shared one. EARLY: it loads its first block of weights before `wait`. For a
    choice's weights that is right only behind `gate_up_of_token`, which releases this one after its own `wait`, so the
    kernel before it has written `chosen`.
    """
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = rows < outputs
    offsets = (rows * inputs)[:, None] + tl.arange(0, BLOCK_K)[None, :]
    from_shared = shared + (rows * width)[:, None] + tl.arange(0, BLOCK_K)[None, :]
    w_first = 0.0
    if EARLY:
        if SHARED_STEPS > 0:
            w_first = _rows(from_shared, 0, inside, width, BLOCK_K, EVEN)
        else:
            # bypass the L1 cache, which may hold the previous step's data
            expert = tl.load(chosen, cache_modifier=".cg").to(tl.int64)
            w_first = _rows(weight + expert * outputs * inputs + offsets, 0, inside, inputs, BLOCK_K, EVEN)
    wait(PDL)
    release(PDL)
    acc = tl.zeros([BLOCK_N, BLOCK_K], dtype=tl.float32)
    if SHARED_STEPS > 0:
        acc = _down(acc, x + TOP_K * inputs, from_shared, 1.0, inside, width, w_first,
                    SHARED_STEPS, BLOCK_N, BLOCK_K, EVEN, EARLY)  # fmt: skip
    for choice in tl.static_range(TOP_K):
        expert = tl.load(chosen + choice).to(tl.int64)
        share = tl.load(weights + choice)
        there = weight + expert * outputs * inputs + offsets
        acc = _down(acc, x + choice * inputs, there, share, inside, inputs, w_first,
                    STEPS, BLOCK_N, BLOCK_K, EVEN, EARLY and SHARED_STEPS == 0 and choice == 0)  # fmt: skip
    y = tl.sum(acc, axis=1)
    if EXTRA:
        y += tl.load(extra + rows, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + rows, y.to(out.dtype.element_ty), mask=inside)
