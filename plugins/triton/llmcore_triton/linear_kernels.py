"""The GPU kernels for few tokens. Weights are read once, and activations come from the L2 cache.

A weight is [outputs, inputs], inputs contiguous. GATED: it has twice as many rows, first the gate's and then up's, and
the result is silu(gate) * up. x and the weight may be codes of 8 bits, int8 or float8, with f32 scales (`scale`: the
weight's). Sums of products of codes are multiplied by the scales. Without codes, scales are None.
"""

from __future__ import annotations

import triton
import triton.language as tl

from llmcore_triton.launch import release, wait

AHEAD: tl.constexpr = tl.constexpr(16)
"""The most tokens whose scales are loaded before the products. Registers have no room for more."""


@triton.jit
def silu_and_mul(gate, up):  # type: ignore[no-untyped-def]
    """The op of that name, in f32."""
    return gate / (1.0 + tl.exp(-gate)) * up


@triton.jit
def touch(  # type: ignore[no-untyped-def]
    weight, first, last, k_steps, outputs, inputs,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, DEPTH: tl.constexpr, SECTOR: tl.constexpr,
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


@triton.jit
def tile_at(  # type: ignore[no-untyped-def]
    tile, rows, columns, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr
):
    """Returns the first row and column of a tile. GROUP rows of tiles use the same columns one after another."""
    first = tile // (GROUP * columns) * GROUP
    turn = tile % (GROUP * columns)
    beside = tl.minimum(rows - first, GROUP)
    return (first + turn % beside) * BLOCK_M, turn // beside * BLOCK_N


@triton.jit
def corner(  # type: ignore[no-untyped-def]
    tile, tokens, outputs, TOKENS: tl.constexpr, BLOCK_N: tl.constexpr, BESIDE: tl.constexpr,
):  # fmt: skip
    """Returns the first token of a tile, and its number among the tiles of outputs.

    BESIDE: tiles of tokens that use the same weights before the next weights come. 0: one tile has all tokens.
    """
    row, column = 0, tile
    if BESIDE > 0:
        rows, columns = tl.cdiv(tokens, TOKENS), tl.cdiv(outputs, BLOCK_N)
        row, column = tile_at(tile, rows, columns, TOKENS, 1, BESIDE)
    return row, column


@triton.jit
def _row_scales(  # type: ignore[no-untyped-def]
    x_scale, scale, tile, tokens, outputs, scale_stride, TOKENS: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Returns the scales of a tile's tokens, [1, TOKENS], and of its weights, [BLOCK_N, 1]."""
    lines, rows = tl.arange(0, TOKENS), tile * BLOCK_N + tl.arange(0, BLOCK_N)
    by_w = tl.load(scale + rows, mask=rows < outputs, other=0.0)[:, None]
    return tl.load(x_scale + lines * scale_stride, mask=lines < tokens, other=0.0)[None, :], by_w


@triton.jit
def store(  # type: ignore[no-untyped-def]
    out, x_scale, scale, bias, acc, up, tile, tokens, outputs, scale_stride,
    TOKENS: tl.constexpr, BLOCK_N: tl.constexpr, GATED: tl.constexpr, HAS_BIAS: tl.constexpr,
    BESIDE: tl.constexpr = 0,
):  # fmt: skip
    """Write one finished tile, acc [BLOCK_N, TOKENS], as rows of out [tokens, outputs].

    Scales are those of whole rows: pointers, loaded for this tile, or None.
    """
    row, column = corner(tile, tokens, outputs, TOKENS, BLOCK_N, BESIDE)
    columns = column * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = columns < outputs
    rows = row + tl.arange(0, TOKENS)
    if scale is not None:
        if scale.dtype.is_ptr():
            x_scale, scale = _row_scales(x_scale, scale, column, tokens, outputs, scale_stride, TOKENS, BLOCK_N)
        acc = acc.to(tl.float32) * scale * x_scale
    if HAS_BIAS:
        acc += tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)[:, None]
    if GATED:
        if HAS_BIAS:
            up += tl.load(bias + outputs + columns, mask=inside, other=0.0).to(tl.float32)[:, None]
        acc = silu_and_mul(acc, up)
    places = out + rows.to(tl.int64)[None, :] * outputs + columns[:, None]
    tl.store(places, acc.to(out.dtype.element_ty), mask=inside[:, None] & (rows < tokens)[None, :])


@triton.jit
def arrive(arrivals, head, tail, k_steps, steps):  # type: ignore[no-untyped-def]
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
def sum_parts(  # type: ignore[no-untyped-def]
    out, x_scale, scale, bias, partials, arrivals, tile, tokens, outputs, scale_stride, k_steps, steps,
    TOKENS: tl.constexpr, BLOCK_N: tl.constexpr, GATED: tl.constexpr, HAS_BIAS: tl.constexpr,
    BESIDE: tl.constexpr = 0,
):  # fmt: skip
    """Adds all parts of a shared tile in their order, and writes it."""
    begin = tile * k_steps
    # reset the counter for the next launch
    tl.store(arrivals + tile, 0)
    places = tl.arange(0, BLOCK_N)[:, None] * TOKENS + tl.arange(0, TOKENS)[None, :]
    acc = tl.zeros([BLOCK_N, TOKENS], dtype=tl.float32)
    up = tl.zeros([BLOCK_N, TOKENS], dtype=tl.float32)
    # by two, because most tiles have two parts, which are then loaded at the same time if they fit into registers
    TURNS: tl.constexpr = 2 if BLOCK_N * TOKENS <= 8192 else 1
    for program in tl.range(begin // steps, (begin + k_steps - 1) // steps + 1, loop_unroll_factor=TURNS):
        slot = 2 * program + (program * steps < begin).to(tl.int32)
        part = partials + slot.to(tl.int64) * ((1 + GATED) * BLOCK_N * TOKENS) + places
        # bypass the L1 cache, which does not see other multiprocessors' writes
        acc += tl.load(part, cache_modifier=".cg")
        if GATED:
            up += tl.load(part + BLOCK_N * TOKENS, cache_modifier=".cg")
    store(out, x_scale, scale, bias, acc, up, tile, tokens, outputs, scale_stride,
          TOKENS, BLOCK_N, GATED, HAS_BIAS, BESIDE)  # fmt: skip


@triton.jit
def end(  # type: ignore[no-untyped-def]
    out, x_scale, scale, bias, partials, acc, up, step, first, tokens, outputs, scale_stride, k_steps,
    TOKENS: tl.constexpr, BLOCK_N: tl.constexpr, GATED: tl.constexpr, HAS_BIAS: tl.constexpr, SHARED: tl.constexpr,
    BESIDE: tl.constexpr = 0,
):  # fmt: skip
    """Write a tile after its last `step` here: as results if all its steps were here, else as one part."""
    tile = step // k_steps
    begin = tile * k_steps
    if not SHARED or (first <= begin and step == begin + k_steps - 1):
        store(out, x_scale, scale, bias, acc, up, tile, tokens, outputs, scale_stride,
              TOKENS, BLOCK_N, GATED, HAS_BIAS, BESIDE)  # fmt: skip
    else:
        slot = 2 * tl.program_id(0) + (first < begin).to(tl.int32)
        part = partials + slot.to(tl.int64) * ((1 + GATED) * BLOCK_N * TOKENS)
        part += tl.arange(0, BLOCK_N)[:, None] * TOKENS + tl.arange(0, TOKENS)[None, :]
        tl.store(part, acc)
        if GATED:
            tl.store(part + BLOCK_N * TOKENS, up)


@triton.jit(do_not_specialize=["tokens", "steps"])
def small_rows(  # type: ignore[no-untyped-def]
    x, weight, x_tiles, w_tiles, x_scale, scale, bias, out, partials, arrivals, tokens, outputs, inputs, x_stride,
    scale_stride, steps,
    TOKENS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GATED: tl.constexpr, HAS_BIAS: tl.constexpr,
    EVEN_N: tl.constexpr, EVEN_K: tl.constexpr, SHARED: tl.constexpr, ONE: tl.constexpr, EARLY: tl.constexpr,
    PDL: tl.constexpr, GROUP: tl.constexpr, SPREAD: tl.constexpr,
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
    - GROUP: 0, or the inputs that share a scale; BLOCK_K divides them. Then x_scale is [tokens, inputs / GROUP], with
      `scale_stride` between rows, else [tokens, 1].
    - SPREAD: rows of the weight that share a scale, so scale is [outputs / SPREAD, inputs / GROUP or 1]. It is 1, or a
      multiple of BLOCK_N.
    """
    k_steps = tl.cdiv(inputs, BLOCK_K)
    first = tl.program_id(0) * steps
    last = tl.minimum(first + steps, tl.cdiv(outputs, BLOCK_N) * k_steps) - 1
    if EARLY != "":
        w_last, v_last = pair_of(weight, w_tiles if EARLY == "shared" else None, last // k_steps, last % k_steps,
                                 outputs, inputs, BLOCK_N, BLOCK_K, GATED, EVEN_N, EVEN_K)  # fmt: skip
    if EARLY == "registers":
        # tl.dot would move loaded operands to shared memory; a cast in between keeps them in registers
        w_last, v_last = _as_bits(w_last), _as_bits(v_last)
    # scales of groups are applied in every step, and those of rows when a tile ends
    x_rows, w_rows = x_scale if GROUP == 0 else None, scale if GROUP == 0 else None
    if GROUP:
        if EARLY != "":
            last_w = _weight_scales(scale, last, k_steps, outputs, inputs, BLOCK_N, BLOCK_K, GROUP, SPREAD)
        by_w = _weight_scales(scale, first, k_steps, outputs, inputs, BLOCK_N, BLOCK_K, GROUP, SPREAD)
    elif scale is not None:
        _touch_scales(scale, first // k_steps, outputs, BLOCK_N)
        if not ONE:
            _touch_scales(scale, last // k_steps, outputs, BLOCK_N)
    wait(PDL)
    release(PDL)
    if EARLY != "":
        x_last = _as_bits(tokens_of(x, None, 0, last % k_steps, tokens, inputs, x_stride, TOKENS, BLOCK_K, EVEN_K))
    if GROUP:
        if EARLY != "":
            last_x = _token_scales(x_scale, last % k_steps, tokens, scale_stride, TOKENS, BLOCK_K, GROUP)
        by_x = _token_scales(x_scale, first % k_steps, tokens, scale_stride, TOKENS, BLOCK_K, GROUP)
    tail_x, tail_w = x_rows, w_rows
    if w_rows is not None and TOKENS <= AHEAD:
        # after the loop, nothing else would happen while they come
        tail_x, tail_w = _row_scales(x_rows, w_rows, last // k_steps, tokens, outputs, scale_stride, TOKENS, BLOCK_N)
    sums: tl.constexpr = tl.int32 if x.dtype.element_ty == tl.int8 else tl.float32
    acc = tl.zeros([BLOCK_N, TOKENS], dtype=sums)
    up = tl.zeros([BLOCK_N, TOKENS], dtype=sums)
    for step in range(first, last + (EARLY == "")):
        xt = tl.trans(tokens_of(x, x_tiles, 0, step % k_steps, tokens, inputs, x_stride, TOKENS, BLOCK_K, EVEN_K))
        w, v = pair_of(weight, w_tiles, step // k_steps, step % k_steps, outputs, inputs,
                       BLOCK_N, BLOCK_K, GATED, EVEN_N, EVEN_K)  # fmt: skip
        # not at the end of a tile: if the tensor cores' accumulator changed in a branch, ptxas would make each of
        # their instructions wait for the one before
        goes_on = step % k_steps != 0
        acc, up = tl.where(goes_on, acc, tl.zeros_like(acc)), tl.where(goes_on, up, tl.zeros_like(up))
        if GROUP:
            now_w, now_x = by_w, by_x
            # one step ahead, because the loop's pipeline has only what is multiplied on tensor cores
            ahead = tl.minimum(step + 1, last)
            by_w = _weight_scales(scale, ahead, k_steps, outputs, inputs, BLOCK_N, BLOCK_K, GROUP, SPREAD)
            by_x = _token_scales(x_scale, ahead % k_steps, tokens, scale_stride, TOKENS, BLOCK_K, GROUP)
            acc += scaled(tl.dot(w, xt), now_w, now_x, SPREAD)
        else:
            acc = tl.dot(w, xt, acc, input_precision="ieee", out_dtype=sums)
        if GATED:
            up = tl.dot(v, xt, up, input_precision="ieee")
        # a program's last tile ends after the loop
        if not ONE:  # noqa: SIM102
            if step % k_steps == k_steps - 1 and step < last:
                end(out, x_rows, w_rows, bias, partials, acc, up, step, first, tokens, outputs, scale_stride, k_steps,
                    TOKENS, BLOCK_N, GATED, HAS_BIAS, SHARED)  # fmt: skip
    if EARLY != "":
        goes_on = last % k_steps != 0
        acc, up = tl.where(goes_on, acc, tl.zeros_like(acc)), tl.where(goes_on, up, tl.zeros_like(up))
        kind: tl.constexpr = x.dtype.element_ty
        xt = tl.trans(x_last.to(kind, bitcast=True))
        if GROUP:
            acc += scaled(tl.dot(w_last.to(kind, bitcast=True), xt), last_w, last_x, SPREAD)
        else:
            acc = tl.dot(w_last.to(kind, bitcast=True), xt, acc, input_precision="ieee", out_dtype=sums)
        if GATED:
            up = tl.dot(v_last.to(kind, bitcast=True), xt, up, input_precision="ieee")
    end(out, tail_x, tail_w, bias, partials, acc, up, last, first, tokens, outputs, scale_stride, k_steps,
         TOKENS, BLOCK_N, GATED, HAS_BIAS, SHARED)  # fmt: skip
    if SHARED:
        head, tail = first // k_steps, last // k_steps
        sums_head, sums_tail = arrive(arrivals, head, tail, k_steps, steps)
        if sums_head:
            sum_parts(out, x_rows, w_rows, bias, partials, arrivals, head, tokens, outputs, scale_stride, k_steps,
                      steps, TOKENS, BLOCK_N, GATED, HAS_BIAS)  # fmt: skip
        if sums_tail:
            sum_parts(out, tail_x, tail_w, bias, partials, arrivals, tail, tokens, outputs, scale_stride, k_steps,
                       steps, TOKENS, BLOCK_N, GATED, HAS_BIAS)  # fmt: skip


@triton.jit
def _touch_scales(scale, tile, outputs, BLOCK_N: tl.constexpr):  # type: ignore[no-untyped-def]
    """Prefetch the scales of a tile's rows into the L2 cache."""
    rows = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    # volatile, because the loaded values are not used
    tl.load(scale + rows, mask=rows < outputs, volatile=True)


@triton.jit
def _weight_scales(  # type: ignore[no-untyped-def]
    scale, step, k_steps, outputs, inputs,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr, SPREAD: tl.constexpr,
):  # fmt: skip
    """Returns the scales of a step's weights, [BLOCK_N, 1] or one number if all are equal."""
    row, groups = step // k_steps * BLOCK_N, inputs // GROUP
    place = scale + step % k_steps * BLOCK_K // GROUP
    if SPREAD > 1:
        found = tl.load(place + row // SPREAD * groups)
    else:
        rows = row + tl.arange(0, BLOCK_N)
        found = tl.load(place + rows * groups, mask=rows < outputs, other=0.0)[:, None]
    return found


@triton.jit
def _token_scales(  # type: ignore[no-untyped-def]
    x_scale, k, tokens, scale_stride, TOKENS: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Returns the scales of step k of x, [1, TOKENS]."""
    lines = tl.arange(0, TOKENS)
    return tl.load(x_scale + k * BLOCK_K // GROUP + lines * scale_stride, mask=lines < tokens, other=0.0)[None, :]


@triton.jit
def scaled(product, by_w, by_x, SPREAD: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns a product of codes times the scales of its rows and columns, with as few multiplications as it takes."""
    if SPREAD > 1:
        found = product * (by_w * by_x)
    else:
        found = product * by_w * by_x
    return found


@triton.jit
def _as_bits(tile):  # type: ignore[no-untyped-def]
    """Returns a tile as another type of its size. It stays in registers until it is cast back for tl.dot."""
    if tile.dtype == tl.int8:
        bits = tile.to(tl.float8e4nv, bitcast=True)
    else:
        bits = tile.to(tl.core.get_int_dtype(bitwidth=tile.dtype.primitive_bitwidth, signed=True), bitcast=True)
    return bits


@triton.jit
def tokens_of(  # type: ignore[no-untyped-def]
    x, tiles, row, k, tokens, inputs, x_stride,
    TOKENS: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr,
):  # fmt: skip
    """Returns step k of x from token `row` on, [TOKENS, BLOCK_K], with zeros outside."""
    if tiles is not None:
        return tiles.load([row, k * BLOCK_K])
    lines, columns = tl.arange(0, TOKENS), tl.arange(0, BLOCK_K)
    here = (row + lines < tokens)[:, None]
    if not EVEN_K:
        here = here & (k * BLOCK_K + columns < inputs)[None, :]
    start = x + tl.cast(row, tl.int64) * x_stride + k * BLOCK_K
    return tl.load(start + lines[:, None] * x_stride + columns[None, :], mask=here, other=0.0)


@triton.jit
def pair_of(  # type: ignore[no-untyped-def]
    weight, tiles, tile, k, outputs, inputs,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GATED: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr,
):  # fmt: skip
    """Returns step k of a tile's weights, [BLOCK_N, BLOCK_K], and of up's if GATED, else the same again."""
    if tiles is not None:
        # zeros outside the weight; behind the gate's last row come rows of up, whose results are not stored
        w = tiles.load([tile * BLOCK_N, k * BLOCK_K])
        v = w
        if GATED:
            v = tiles.load([outputs + tile * BLOCK_N, k * BLOCK_K])
    else:
        place = weight + (tile * BLOCK_N).to(tl.int64) * inputs + k * BLOCK_K
        place += (tl.arange(0, BLOCK_N) * inputs)[:, None] + tl.arange(0, BLOCK_K)[None, :]
        w = weights_of(place, tile, k, outputs, inputs, BLOCK_N, BLOCK_K, EVEN_N, EVEN_K)
        v = w
        if GATED:
            place += outputs.to(tl.int64) * inputs
            v = weights_of(place, tile, k, outputs, inputs, BLOCK_N, BLOCK_K, EVEN_N, EVEN_K)
    return w, v


@triton.jit
def weights_of(  # type: ignore[no-untyped-def]
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
    w = weights_of(place, tile, 0, outputs, inputs, BLOCK_N, BLOCK_K, EVEN_N, EVEN_K)
    v = w
    if GATED:
        v = weights_of(place_up, tile, 0, outputs, inputs, BLOCK_N, BLOCK_K, EVEN_N, EVEN_K)
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
        w = weights_of(place, tile, k, outputs, inputs, BLOCK_N, BLOCK_K, EVEN_N, EVEN_K)
        if GATED:
            up += v.to(tl.float32) * xs
            v = weights_of(place_up, tile, k, outputs, inputs, BLOCK_N, BLOCK_K, EVEN_N, EVEN_K)
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
        y = silu_and_mul(y, z)
    tl.store(out + token * outputs + outs, y.to(out.dtype.element_ty), mask=inside)
