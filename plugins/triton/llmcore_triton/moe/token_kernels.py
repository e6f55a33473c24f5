"""What a mixture of experts runs on the GPU for one token: weights stream once, without tensor cores."""

from __future__ import annotations

import triton
import triton.language as tl

from llmcore_triton.launch import release, wait
from llmcore_triton.moe.experts_kernels import silu_and_mul


@triton.jit
def _rows(there, k, inside, inputs, BLOCK_K: tl.constexpr, EVEN: tl.constexpr):  # type: ignore[no-untyped-def]
    """A block of weights, from which nothing is read twice."""
    columns = k * BLOCK_K + tl.arange(0, BLOCK_K)
    if EVEN:
        return tl.load(there + k * BLOCK_K, eviction_policy="evict_first")
    mask = inside[:, None] & (columns < inputs)[None, :]
    return tl.load(there + k * BLOCK_K, mask=mask, other=0.0, eviction_policy="evict_first")


@triton.jit
def _vector(x, k, inputs, BLOCK_K: tl.constexpr):  # type: ignore[no-untyped-def]
    """A block of one token's row, [1, BLOCK_K]."""
    columns = k * BLOCK_K + tl.arange(0, BLOCK_K)
    return tl.load(x + columns, mask=columns < inputs, other=0.0).to(tl.float32)[None, :]


@triton.jit
def gate_up_of_token(  # type: ignore[no-untyped-def]
    x, weight, chosen, out, inner, inputs,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out [choices, inner] = silu(gate) * up of x [inputs]: BLOCK_N of inner of choice program_id(1) per program."""
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = rows < inner
    choice = tl.program_id(1)
    wait(PDL)
    release(PDL)
    expert = tl.load(chosen + choice).to(tl.int64)
    there = weight + expert * 2 * inner * inputs + (rows * inputs)[:, None] + tl.arange(0, BLOCK_K)[None, :]
    up_there = there + inner.to(tl.int64) * inputs
    w, v = _rows(there, 0, inside, inputs, BLOCK_K, EVEN), _rows(up_there, 0, inside, inputs, BLOCK_K, EVEN)
    gate = tl.zeros([BLOCK_N, BLOCK_K], dtype=tl.float32)
    up = tl.zeros([BLOCK_N, BLOCK_K], dtype=tl.float32)
    # the next block is on its way while this one is multiplied; the last has no next one
    for k in range(1, tl.cdiv(inputs, BLOCK_K)):
        xs = _vector(x, k - 1, inputs, BLOCK_K)
        gate += w.to(tl.float32) * xs
        w = _rows(there, k, inside, inputs, BLOCK_K, EVEN)
        up += v.to(tl.float32) * xs
        v = _rows(up_there, k, inside, inputs, BLOCK_K, EVEN)
    xs = _vector(x, tl.cdiv(inputs, BLOCK_K) - 1, inputs, BLOCK_K)
    first, second = tl.sum(gate + w.to(tl.float32) * xs, axis=1), tl.sum(up + v.to(tl.float32) * xs, axis=1)
    tl.store(out + choice * inner + rows, silu_and_mul(first, second).to(out.dtype.element_ty), mask=inside)


@triton.jit
def down_of_token(  # type: ignore[no-untyped-def]
    x, weight, chosen, weights, extra, out, outputs, inputs,
    TOP_K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STEPS: tl.constexpr, EVEN: tl.constexpr,
    EXTRA: tl.constexpr, EARLY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out [outputs]: the sum over TOP_K choices of weights times x [choice, inputs] by the expert's down, and extra.

    A program has BLOCK_N outputs of all choices, STEPS blocks of inputs each. EARLY: its first block of weights is
    loaded before `wait`, which is right only behind `gate_up_of_token`: that kernel lets this one start after its own
    `wait`, so `chosen`, from the kernel before it, has been written.
    """
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = rows < outputs
    offsets = (rows * inputs)[:, None] + tl.arange(0, BLOCK_K)[None, :]
    if EARLY:
        # past the L1 cache: what the step before left there is old
        expert = tl.load(chosen, cache_modifier=".cg").to(tl.int64)
        w_first = _rows(weight + expert * outputs * inputs + offsets, 0, inside, inputs, BLOCK_K, EVEN)
    wait(PDL)
    release(PDL)
    acc = tl.zeros([BLOCK_N, BLOCK_K], dtype=tl.float32)
    for choice in tl.static_range(TOP_K):
        expert = tl.load(chosen + choice).to(tl.int64)
        share = tl.load(weights + choice)
        there = weight + expert * outputs * inputs + offsets
        if EARLY and choice == 0:
            acc += w_first.to(tl.float32) * (_vector(x, 0, inputs, BLOCK_K) * share)
            for k in range(1, STEPS):
                w = _rows(there, k, inside, inputs, BLOCK_K, EVEN)
                acc += w.to(tl.float32) * (_vector(x, k, inputs, BLOCK_K) * share)
        else:
            for k in range(0, STEPS):
                w = _rows(there, k, inside, inputs, BLOCK_K, EVEN)
                acc += w.to(tl.float32) * (_vector(x + choice * inputs, k, inputs, BLOCK_K) * share)
    y = tl.sum(acc, axis=1)
    if EXTRA:
        y += tl.load(extra + rows, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + rows, y.to(out.dtype.element_ty), mask=inside)
