"""What the kernels for few tokens run on the GPU: weights stream once, activations come from the L2 cache.

A weight is [outputs, inputs], inputs contiguous. GATED: it holds twice as many rows, first those of the gate, then as
many of up, and the result is silu(gate) * up.
"""

from __future__ import annotations

import triton
import triton.language as tl

from llmcore_triton.launch import release, wait


@triton.jit
def _silu_and_mul(gate, up):  # type: ignore[no-untyped-def]
    return gate / (1.0 + tl.exp(-gate)) * up


@triton.jit
def touch(  # type: ignore[no-untyped-def]
    weight, first, last, k_steps, outputs, inputs,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GATED: tl.constexpr, DEPTH: tl.constexpr, SECTOR: tl.constexpr,
):  # fmt: skip
    """Bring the first DEPTH weight tiles into the L2 cache; SECTOR: elements that travel together."""
    rows = tl.arange(0, BLOCK_N)
    columns = tl.arange(0, BLOCK_K // SECTOR) * SECTOR
    for ahead in tl.static_range(DEPTH):
        step = first + ahead
        row = step // k_steps * BLOCK_N
        column = step % k_steps * BLOCK_K
        mask = (step < last) & (row + rows < outputs)[:, None] & (column + columns < inputs)[None, :]
        tile = weight + row.to(tl.int64) * inputs + column + (rows * inputs)[:, None] + columns[None, :]
        # volatile, because nobody uses what is loaded
        tl.load(tile, mask=mask, volatile=True)
        if GATED:
            tl.load(tile + outputs.to(tl.int64) * inputs, mask=mask, volatile=True)


@triton.jit
def _store(  # type: ignore[no-untyped-def]
    out, bias, acc, up, tile, tokens, outputs,
    TOKENS: tl.constexpr, BLOCK_N: tl.constexpr, GATED: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """Write one finished tile, acc [BLOCK_N, TOKENS], as rows of out [tokens, outputs]."""
    columns = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = columns < outputs
    if HAS_BIAS:
        acc += tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)[:, None]
    if GATED:
        if HAS_BIAS:
            up += tl.load(bias + outputs + columns, mask=inside, other=0.0).to(tl.float32)[:, None]
        acc = _silu_and_mul(acc, up)
    rows = tl.arange(0, TOKENS)
    places = out + rows.to(tl.int64)[None, :] * outputs + columns[:, None]
    tl.store(places, acc.to(out.dtype.element_ty), mask=inside[:, None] & (rows < tokens)[None, :])


@triton.jit
def _sum_shared(  # type: ignore[no-untyped-def]
    out, bias, partials, arrivals, tile, tokens, outputs, k_steps, steps,
    TOKENS: tl.constexpr, BLOCK_N: tl.constexpr, GATED: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """Say that this program's part of a shared tile is written; the last to say so adds all parts, in their order."""
    begin = tile * k_steps
    first = begin // steps
    others = (begin + k_steps - 1) // steps - first
    # not `and`, which computes both sides
    if others > 0:  # noqa: SIM102
        if tl.atomic_add(arrivals + tile, 1, sem="acq_rel", scope="gpu") == others:
            # the next launch finds the counter as this one did
            tl.store(arrivals + tile, 0)
            places = tl.arange(0, BLOCK_N)[:, None] * TOKENS + tl.arange(0, TOKENS)[None, :]
            acc = tl.zeros([BLOCK_N, TOKENS], dtype=tl.float32)
            up = tl.zeros([BLOCK_N, TOKENS], dtype=tl.float32)
            for program in range(first, first + others + 1):
                slot = 2 * program + (program * steps < begin).to(tl.int32)
                part = partials + slot.to(tl.int64) * ((1 + GATED) * BLOCK_N * TOKENS) + places
                # past the L1 cache, which does not see what other processors write
                acc += tl.load(part, cache_modifier=".cg")
                if GATED:
                    up += tl.load(part + BLOCK_N * TOKENS, cache_modifier=".cg")
            _store(out, bias, acc, up, tile, tokens, outputs, TOKENS, BLOCK_N, GATED, HAS_BIAS)


@triton.jit(do_not_specialize=["tokens", "steps"])
def small_rows(  # type: ignore[no-untyped-def]
    x, weight, bias, out, partials, arrivals, tokens, outputs, inputs, x_stride, steps,
    TOKENS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GATED: tl.constexpr, HAS_BIAS: tl.constexpr,
    EVEN_N: tl.constexpr, EVEN_K: tl.constexpr, SHARED: tl.constexpr, DEPTH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out [tokens, outputs] = x [tokens, inputs] weight^T for at most TOKENS tokens; weights are the rows of the MMA.

    The steps, BLOCK_K inputs of BLOCK_N outputs each, are numbered through all tiles, and every program takes `steps`
    consecutive ones (Stream-K, arXiv:2301.03598): all are equally long, whatever the shape. SHARED: tiles may begin
    in one program and end in another; then each writes its part (f32) into one of its two slots in `partials`.
    """
    k_steps = tl.cdiv(inputs, BLOCK_K)
    first = tl.program_id(0) * steps
    last = tl.minimum(first + steps, tl.cdiv(outputs, BLOCK_N) * k_steps)
    if PDL:
        touch(
            weight, first, last, k_steps, outputs, inputs,
            BLOCK_N, BLOCK_K, GATED, DEPTH, 256 // weight.dtype.element_ty.primitive_bitwidth,
        )  # fmt: skip
    wait(PDL)
    release(PDL)
    rows, columns, lines = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K), tl.arange(0, TOKENS)
    inside_w, inside_x = (rows * inputs)[:, None] + columns[None, :], lines[:, None] * x_stride + columns[None, :]
    acc = tl.zeros([BLOCK_N, TOKENS], dtype=tl.float32)
    up = tl.zeros([BLOCK_N, TOKENS], dtype=tl.float32)
    for step in range(first, last):
        tile = step // k_steps
        k = step - tile * k_steps
        tile_w = weight + (tile * BLOCK_N).to(tl.int64) * inputs + k * BLOCK_K + inside_w
        here = (lines < tokens)[:, None]
        if not EVEN_K:
            here = here & (k * BLOCK_K + columns < inputs)[None, :]
        xt = tl.trans(tl.load(x + k * BLOCK_K + inside_x, mask=here, other=0.0))
        w = _weights(tile_w, tile, k, outputs, inputs, BLOCK_N, BLOCK_K, EVEN_N, EVEN_K)
        acc = tl.dot(w, xt, acc, input_precision="ieee")
        if GATED:
            w = _weights(tile_w + outputs.to(tl.int64) * inputs, tile, k, outputs, inputs,
                         BLOCK_N, BLOCK_K, EVEN_N, EVEN_K)  # fmt: skip
            up = tl.dot(w, xt, up, input_precision="ieee")
        if k == k_steps - 1 or step == last - 1:
            if not SHARED or (first <= tile * k_steps and k == k_steps - 1):
                _store(out, bias, acc, up, tile, tokens, outputs, TOKENS, BLOCK_N, GATED, HAS_BIAS)
            else:
                slot = 2 * tl.program_id(0) + (first < tile * k_steps).to(tl.int32)
                part = partials + slot.to(tl.int64) * ((1 + GATED) * BLOCK_N * TOKENS)
                part += rows[:, None] * TOKENS + lines[None, :]
                tl.store(part, acc)
                if GATED:
                    tl.store(part + BLOCK_N * TOKENS, up)
            acc = tl.zeros([BLOCK_N, TOKENS], dtype=tl.float32)
            up = tl.zeros([BLOCK_N, TOKENS], dtype=tl.float32)
    if SHARED:
        # all threads have written before one of them says so
        tl.debug_barrier()
        begin, end = first // k_steps, (last - 1) // k_steps
        if first < last:
            _sum_shared(out, bias, partials, arrivals, begin, tokens, outputs, k_steps, steps,
                        TOKENS, BLOCK_N, GATED, HAS_BIAS)  # fmt: skip
        if begin < end:
            _sum_shared(out, bias, partials, arrivals, end, tokens, outputs, k_steps, steps,
                        TOKENS, BLOCK_N, GATED, HAS_BIAS)  # fmt: skip


@triton.jit
def _weights(  # type: ignore[no-untyped-def]
    place, tile, k, outputs, inputs,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr,
):  # fmt: skip
    """A tile of weights; what lies outside is zero."""
    if EVEN_N and EVEN_K:
        return tl.load(place, eviction_policy="evict_first")
    rows = tile * BLOCK_N + tl.arange(0, BLOCK_N) < outputs
    columns = k * BLOCK_K + tl.arange(0, BLOCK_K) < inputs
    return tl.load(place, mask=rows[:, None] & columns[None, :], other=0.0, eviction_policy="evict_first")


@triton.jit
def gemv(  # type: ignore[no-untyped-def]
    x, weight, bias, out, outputs, inputs, x_stride,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GATED: tl.constexpr, HAS_BIAS: tl.constexpr,
    EVEN_N: tl.constexpr, EVEN_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out [T, outputs] = x weight^T without tensor cores: BLOCK_N outputs of token program_id(1) per program.

    The next BLOCK_K inputs' weights are on their way while these are multiplied; the first set out before `wait`.
    """
    tile, token = tl.program_id(0), tl.program_id(1).to(tl.int64)
    rows, columns = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    place = weight + (tile * BLOCK_N).to(tl.int64) * inputs + (rows * inputs)[:, None] + columns[None, :]
    place_up = place + outputs.to(tl.int64) * inputs
    w = _weights(place, tile, 0, outputs, inputs, BLOCK_N, BLOCK_K, EVEN_N, EVEN_K)
    v = w
    if GATED:
        v = _weights(place_up, tile, 0, outputs, inputs, BLOCK_N, BLOCK_K, EVEN_N, EVEN_K)
    wait(PDL)
    release(PDL)
    acc = tl.zeros([BLOCK_N, BLOCK_K], dtype=tl.float32)
    up = tl.zeros([BLOCK_N, BLOCK_K], dtype=tl.float32)
    # the last block has no next one
    for k in range(1, tl.cdiv(inputs, BLOCK_K)):
        xs = tl.load(x + token * x_stride + (k - 1) * BLOCK_K + columns).to(tl.float32)[None, :]
        place += BLOCK_K
        place_up += BLOCK_K
        acc += w.to(tl.float32) * xs
        w = _weights(place, tile, k, outputs, inputs, BLOCK_N, BLOCK_K, EVEN_N, EVEN_K)
        if GATED:
            up += v.to(tl.float32) * xs
            v = _weights(place_up, tile, k, outputs, inputs, BLOCK_N, BLOCK_K, EVEN_N, EVEN_K)
    done = (tl.cdiv(inputs, BLOCK_K) - 1) * BLOCK_K
    xs = tl.load(x + token * x_stride + done + columns, mask=done + columns < inputs, other=0.0).to(tl.float32)[
        None, :
    ]
    y = tl.sum(acc + w.to(tl.float32) * xs, axis=1)
    outs = tile * BLOCK_N + rows
    inside = outs < outputs
    if HAS_BIAS:
        y += tl.load(bias + outs, mask=inside, other=0.0).to(tl.float32)
    if GATED:
        z = tl.sum(up + v.to(tl.float32) * xs, axis=1)
        if HAS_BIAS:
            z += tl.load(bias + outputs + outs, mask=inside, other=0.0).to(tl.float32)
        y = _silu_and_mul(y, z)
    tl.store(out + token * outputs + outs, y.to(out.dtype.element_ty), mask=inside)
