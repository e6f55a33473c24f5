"""The GPU kernels for few tokens. Weights are read once, and activations come from the L2 cache.

A weight is [outputs, inputs], inputs contiguous. GATED: it has twice as many rows, first the gate's and then up's, and
the result is silu(gate) * up.
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
    """Prefetch the first DEPTH weight tiles into the L2 cache. SECTOR: elements that memory transfers together."""
    rows = tl.arange(0, BLOCK_N)
    columns = tl.arange(0, BLOCK_K // SECTOR) * SECTOR
    for ahead in tl.static_range(DEPTH):
        step = first + ahead
        row = step // k_steps * BLOCK_N
        column = step % k_steps * BLOCK_K
        mask = (step < last) & (row + rows < outputs)[:, None] & (column + columns < inputs)[None, :]
        tile = weight + row.to(tl.int64) * inputs + column + (rows * inputs)[:, None] + columns[None, :]
        # volatile, because the loaded values are not used
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
def _arrive(arrivals, head, tail, k_steps, steps):  # type: ignore[no-untyped-def]
    """Report that this program's parts of its first and last tile, `head` and `tail`, are written.

    Returns for each of the two whether all other parts are written. It is False if no other program has a part, and
    for `head` if it is also `tail`.
    """
    which = tl.arange(0, 2)
    begin = tl.where(which == 0, head, tail) * k_steps
    others = (begin + k_steps - 1) // steps - begin // steps
    shared = (others > 0) & ((which == 1) | (head < tail))
    # all threads write before one of them reports it
    tl.debug_barrier()
    # both at once: each takes as long as a load from memory
    before = tl.atomic_add(arrivals + begin // k_steps, 1, mask=shared, sem="acq_rel", scope="gpu")
    complete = (shared & (before == others)).to(tl.int32)
    return tl.sum(tl.where(which == 0, complete, 0)) > 0, tl.sum(tl.where(which == 1, complete, 0)) > 0


@triton.jit
def _sum_parts(  # type: ignore[no-untyped-def]
    out, bias, partials, arrivals, tile, tokens, outputs, k_steps, steps,
    TOKENS: tl.constexpr, BLOCK_N: tl.constexpr, GATED: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """Adds all parts of a shared tile in their order, and writes it."""
    begin = tile * k_steps
    # reset the counter for the next launch
    tl.store(arrivals + tile, 0)
    places = tl.arange(0, BLOCK_N)[:, None] * TOKENS + tl.arange(0, TOKENS)[None, :]
    acc = tl.zeros([BLOCK_N, TOKENS], dtype=tl.float32)
    up = tl.zeros([BLOCK_N, TOKENS], dtype=tl.float32)
    # by two, because most tiles have two parts, which are then loaded at the same time
    for program in tl.range(begin // steps, (begin + k_steps - 1) // steps + 1, loop_unroll_factor=2):
        slot = 2 * program + (program * steps < begin).to(tl.int32)
        part = partials + slot.to(tl.int64) * ((1 + GATED) * BLOCK_N * TOKENS) + places
        # bypass the L1 cache, which does not see other multiprocessors' writes
        acc += tl.load(part, cache_modifier=".cg")
        if GATED:
            up += tl.load(part + BLOCK_N * TOKENS, cache_modifier=".cg")
    _store(out, bias, acc, up, tile, tokens, outputs, TOKENS, BLOCK_N, GATED, HAS_BIAS)


@triton.jit
def _end(  # type: ignore[no-untyped-def]
    out, bias, partials, acc, up, step, first, tokens, outputs, k_steps,
    TOKENS: tl.constexpr, BLOCK_N: tl.constexpr, GATED: tl.constexpr, HAS_BIAS: tl.constexpr, SHARED: tl.constexpr,
):  # fmt: skip
    """Write a tile after its last `step` here: as results if all its steps were here, else as one part."""
    tile = step // k_steps
    begin = tile * k_steps
    if not SHARED or (first <= begin and step == begin + k_steps - 1):
        _store(out, bias, acc, up, tile, tokens, outputs, TOKENS, BLOCK_N, GATED, HAS_BIAS)
    else:
        slot = 2 * tl.program_id(0) + (first < begin).to(tl.int32)
        part = partials + slot.to(tl.int64) * ((1 + GATED) * BLOCK_N * TOKENS)
        part += tl.arange(0, BLOCK_N)[:, None] * TOKENS + tl.arange(0, TOKENS)[None, :]
        tl.store(part, acc)
        if GATED:
            tl.store(part + BLOCK_N * TOKENS, up)


@triton.jit(do_not_specialize=["tokens", "steps"])
def small_rows(  # type: ignore[no-untyped-def]
    x, weight, x_tiles, w_tiles, bias, out, partials, arrivals, tokens, outputs, inputs, x_stride, steps,
    TOKENS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GATED: tl.constexpr, HAS_BIAS: tl.constexpr,
    EVEN_N: tl.constexpr, EVEN_K: tl.constexpr, SHARED: tl.constexpr, ONE: tl.constexpr, EARLY: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """out [tokens, outputs] = x [tokens, inputs] weight^T for at most TOKENS tokens. Weights are the rows of the MMA.

    The steps, BLOCK_K inputs of BLOCK_N outputs each, are numbered through all tiles. Every program takes `steps`
    consecutive ones (Stream-K, arXiv:2301.03598), so all programs are equally long.
    - ONE: `steps` is one tile.
    - SHARED: a tile may begin in one program and end in another. Each then writes its part (f32) into one of its two
      slots in `partials`.
    - `x_tiles`, `w_tiles`: tensor descriptors of x in [TOKENS, BLOCK_K] and weight in [BLOCK_N, BLOCK_K], or None.
    - EARLY: the weights of the last step are loaded before `wait` and kept in "registers" or "shared" memory, which
      keeps memory busy while the previous kernel ends. "": they are not.
    """
    k_steps = tl.cdiv(inputs, BLOCK_K)
    first = tl.program_id(0) * steps
    last = tl.minimum(first + steps, tl.cdiv(outputs, BLOCK_N) * k_steps) - 1
    if EARLY != "":
        w_last, v_last = _pair(weight, w_tiles if EARLY == "shared" else None, last, k_steps, outputs, inputs,
                               BLOCK_N, BLOCK_K, GATED, EVEN_N, EVEN_K)  # fmt: skip
    if EARLY == "registers":
        # tl.dot would move loaded operands to shared memory; a cast in between keeps them in registers
        w_last, v_last = _as_bits(w_last), _as_bits(v_last)
    wait(PDL)
    release(PDL)
    if EARLY != "":
        x_last = _as_bits(_tokens(x, None, last % k_steps, tokens, inputs, x_stride, TOKENS, BLOCK_K, EVEN_K))
    acc = tl.zeros([BLOCK_N, TOKENS], dtype=tl.float32)
    up = tl.zeros([BLOCK_N, TOKENS], dtype=tl.float32)
    for step in range(first, last + (EARLY == "")):
        xt = tl.trans(_tokens(x, x_tiles, step % k_steps, tokens, inputs, x_stride, TOKENS, BLOCK_K, EVEN_K))
        w, v = _pair(weight, w_tiles, step, k_steps, outputs, inputs, BLOCK_N, BLOCK_K, GATED, EVEN_N, EVEN_K)
        # not at the end of a tile: if the tensor cores' accumulator changed in a branch, ptxas would make each of
        # their instructions wait for the one before
        goes_on = step % k_steps != 0
        acc, up = tl.where(goes_on, acc, 0.0), tl.where(goes_on, up, 0.0)
        acc = tl.dot(w, xt, acc, input_precision="ieee")
        if GATED:
            up = tl.dot(v, xt, up, input_precision="ieee")
        # a program's last tile ends after the loop
        if not ONE:  # noqa: SIM102
            if step % k_steps == k_steps - 1 and step < last:
                _end(out, bias, partials, acc, up, step, first, tokens, outputs, k_steps,
                     TOKENS, BLOCK_N, GATED, HAS_BIAS, SHARED)  # fmt: skip
    if EARLY != "":
        goes_on = last % k_steps != 0
        acc, up = tl.where(goes_on, acc, 0.0), tl.where(goes_on, up, 0.0)
        kind: tl.constexpr = x.dtype.element_ty
        xt = tl.trans(x_last.to(kind, bitcast=True))
        acc = tl.dot(w_last.to(kind, bitcast=True), xt, acc, input_precision="ieee")
        if GATED:
            up = tl.dot(v_last.to(kind, bitcast=True), xt, up, input_precision="ieee")
    _end(out, bias, partials, acc, up, last, first, tokens, outputs, k_steps,
         TOKENS, BLOCK_N, GATED, HAS_BIAS, SHARED)  # fmt: skip
    if SHARED:
        head, tail = first // k_steps, last // k_steps
        sums_head, sums_tail = _arrive(arrivals, head, tail, k_steps, steps)
        if sums_head:
            _sum_parts(out, bias, partials, arrivals, head, tokens, outputs, k_steps, steps,
                       TOKENS, BLOCK_N, GATED, HAS_BIAS)  # fmt: skip
        if sums_tail:
            _sum_parts(out, bias, partials, arrivals, tail, tokens, outputs, k_steps, steps,
                       TOKENS, BLOCK_N, GATED, HAS_BIAS)  # fmt: skip


@triton.jit
def _as_bits(tile):  # type: ignore[no-untyped-def]
    """Returns a tile as integers. They stay in registers until they are cast back for tl.dot."""
    return tile.to(tl.core.get_int_dtype(bitwidth=tile.dtype.primitive_bitwidth, signed=True), bitcast=True)


@triton.jit
def _tokens(  # type: ignore[no-untyped-def]
    x, tiles, k, tokens, inputs, x_stride, TOKENS: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr,
):  # fmt: skip
    """Returns step k of x, [TOKENS, BLOCK_K], with zeros outside."""
    if tiles is not None:
        return tiles.load([0, k * BLOCK_K])
    lines, columns = tl.arange(0, TOKENS), tl.arange(0, BLOCK_K)
    here = (lines < tokens)[:, None]
    if not EVEN_K:
        here = here & (k * BLOCK_K + columns < inputs)[None, :]
    return tl.load(x + k * BLOCK_K + lines[:, None] * x_stride + columns[None, :], mask=here, other=0.0)


@triton.jit
def _pair(  # type: ignore[no-untyped-def]
    weight, tiles, step, k_steps, outputs, inputs,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GATED: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr,
):  # fmt: skip
    """Returns a step's weights, [BLOCK_N, BLOCK_K], and those of up if GATED, else the same again."""
    tile = step // k_steps
    k = step - tile * k_steps
    if tiles is not None:
        # zeros outside the weight; behind the gate's last row come rows of up, whose results are not stored
        w = tiles.load([tile * BLOCK_N, k * BLOCK_K])
        v = w
        if GATED:
            v = tiles.load([outputs + tile * BLOCK_N, k * BLOCK_K])
    else:
        place = weight + (tile * BLOCK_N).to(tl.int64) * inputs + k * BLOCK_K
        place += (tl.arange(0, BLOCK_N) * inputs)[:, None] + tl.arange(0, BLOCK_K)[None, :]
        w = _weights(place, tile, k, outputs, inputs, BLOCK_N, BLOCK_K, EVEN_N, EVEN_K)
        v = w
        if GATED:
            place += outputs.to(tl.int64) * inputs
            v = _weights(place, tile, k, outputs, inputs, BLOCK_N, BLOCK_K, EVEN_N, EVEN_K)
    return w, v


@triton.jit
def _weights(  # type: ignore[no-untyped-def]
    place, tile, k, outputs, inputs,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr,
):  # fmt: skip
    """Returns a tile of weights, with zeros outside."""
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
    """out [T, outputs] = x weight^T without tensor cores. Each program has BLOCK_N outputs of token program_id(1).

    The next BLOCK_K inputs' weights load while these are multiplied. The first load starts before `wait`.
    """
    tile, token = tl.program_id(0), tl.program_id(1).to(tl.int64)
    rows, columns = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    place = weight + (tile * BLOCK_N).to(tl.int64) * inputs + (rows * inputs)[:, None] + columns[None, :]
    place_up = place
    if GATED:
        place_up += outputs.to(tl.int64) * inputs
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
