"""moe.route: the router's product, scores and the best experts in one launch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from llmcore.api import OpContext

from llmcore_triton import tuned
from llmcore_triton.launch import Bound, overlaps, place, release, wait
from llmcore_triton.linear_shapes import buffer, power_of_two
from llmcore_triton.rows import size
from llmcore_triton.specs.rows import NAME

TILES = (1, 1, 4, 16)
"""Token bucket -> tiles of 16 tokens whose inputs may be split. Larger steps have enough programs."""

_TILE = 16
_STAGES = 3


class Route:
    """The op for any number of tokens."""

    def __init__(self, context: OpContext, config: Mapping[str, Any]) -> None:
        shape = context.shape
        experts, groups = size(context, "experts"), int(shape.get("groups") or 1)
        self._top_k = size(context, "top_k")
        group = experts // groups
        groups_padded = power_of_two(groups)
        padded = max(power_of_two(group), _TILE // groups_padded)
        self._config, self._columns = config, groups_padded * padded
        overlap = overlaps(context)
        self._launch = Bound(
            route,
            BLOCK_K=config["block_k"],
            GROUPS=groups,
            GROUP_SIZE=group,
            GROUPS_PADDED=groups_padded,
            PADDED=padded,
            TOP_K=self._top_k,
            TOP_GROUPS=int(shape.get("top_groups") or 1),
            TOP2=shape.get("group_score") == "top2",
            SIGMOID=shape.get("scoring") == "sigmoid",
            NORMALIZE=bool(shape.get("normalize")),
            SCALE=float(shape.get("scale") or 1.0),
            TOP_PADDED=power_of_two(self._top_k),
            PDL=overlap,
            num_warps=config["warps"],
            num_stages=_STAGES,
            launch_pdl=overlap,
        )
        self._tiles = TILES[context.bucket] if config["splits"] > 1 and context.bucket < len(TILES) else 0
        # made here: a call may be captured into a CUDA graph, and must not own memory
        where, parts = place(context), self._tiles * config["splits"] * _TILE * self._columns
        self._partials = buffer(where, torch.float32, power_of_two(parts))
        self._arrivals = buffer(where, torch.int32, power_of_two(max(TILES)))

    def __call__(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x [T, size], weight [experts, size], bias [experts] f32 or None -> weights f32, experts int32 [T, top_k]."""
        tokens, inputs, block_k = len(x), weight.shape[1], self._config["block_k"]
        weights = torch.empty((tokens, self._top_k), dtype=torch.float32, device=x.device)
        chosen = torch.empty((tokens, self._top_k), dtype=torch.int32, device=x.device)
        steps = -(-inputs // block_k)
        split = -(-tokens // _TILE) <= self._tiles
        block_m = _TILE if split else self._config["block_m"]
        if split:
            # programs without inputs write zeros
            steps = -(-steps // self._config["splits"])
        splits = self._config["splits"] if split else 1
        self._launch.but(
            BLOCK_M=block_m,
            ROWS=1 if split and tokens == 1 else block_m,
            SPLITS=splits,
            EVEN_K=inputs % block_k == 0,
            HAS_BIAS=bias is not None,
        )(
            (-(-tokens // block_m), splits),
            *(x, weight, weight if bias is None else bias, weights, chosen, self._partials, self._arrivals),
            *(tokens, inputs, x.stride(0), steps),
        )
        return weights, chosen


def default(context: OpContext) -> dict[str, Any]:
    """The default splits the inputs of few tokens over programs. Under `deterministic` no inputs are split."""
    if context.deterministic:
        return {"block_m": _TILE, "block_k": 64 if context.dtype != "f32" else 32, "splits": 1, "warps": 4}
    splits = (16, 16, 8, 4, 1)[context.bucket]
    wide = size(context, "experts") > 128
    block_k = 32 if context.dtype == "f32" else 128 if splits > 4 and not wide else 64
    block_m, warps = 16 if context.bucket < len(TILES) else 32, 8 if wide else 4
    return {"block_m": block_m, "block_k": block_k, "splits": splits, "warps": warps}


def candidates(context: OpContext) -> Iterator[dict[str, Any]]:
    """Splits and tiles worth timing."""
    if context.deterministic:
        return
    base = default(context)
    yield base
    if context.bucket == len(TILES):
        shapes = [(m, k, 1, warps) for m in (16, 32, 64) for k in (64, 128) for warps in (4, 8)]
    else:
        splits = (8, 16, 32) if context.bucket < 2 else (2, 4, 8)
        shapes = [(16, k, parts, warps) for parts in splits for k in (64, 128) for warps in (2, 4, 8)]
    for block_m, block_k, parts, warps in shapes:
        config = {"block_m": block_m, "block_k": block_k, "splits": parts, "warps": warps}
        if context.dtype != "f32" and config != base:
            yield config


def make_with(context: OpContext, config: Mapping[str, Any]) -> Route:
    """The op in the configuration `config`."""
    return Route(context, {**default(context), **config})


def make(context: OpContext) -> Route:
    """The op in the fastest measured configuration, or in the default one."""
    base = default(context)
    return Route(context, base if context.deterministic else tuned.choose(NAME, context, base))


@triton.jit
def _row_of(column, GROUP_SIZE: tl.constexpr, PADDED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns the expert in a column. Each group of GROUP_SIZE experts has PADDED columns."""
    return column // PADDED * GROUP_SIZE + column % PADDED


@triton.jit
def _logits(  # type: ignore[no-untyped-def]
    acc, w, x, step, lines, tokens, inputs, x_stride, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr,
):  # fmt: skip
    """Adds the products of one step's x with w [columns, BLOCK_K] to acc [rows, columns]."""
    ks = step * BLOCK_K + tl.arange(0, BLOCK_K)
    here = (lines < tokens)[:, None]
    if not EVEN_K:
        here = here & (ks < inputs)[None, :]
    xs = tl.load(x + lines.to(tl.int64)[:, None] * x_stride + ks[None, :], mask=here, other=0.0)
    # a router in f32 gets the activations in f32
    if x.dtype.element_ty != w.dtype:
        xs, w = xs.to(tl.float32), w.to(tl.float32)
    return tl.dot(xs, tl.trans(w), acc, input_precision="ieee")


@triton.jit
def _router(weight, experts, real, step, inputs, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns one step's weights [columns, BLOCK_K]. Columns without an expert are zero."""
    ks = step * BLOCK_K + tl.arange(0, BLOCK_K)
    here = real[:, None]
    if not EVEN_K:
        here = here & (ks < inputs)[None, :]
    return tl.load(weight + experts[:, None] * inputs + ks[None, :], mask=here, other=0.0)


@triton.jit
def _in_groups(  # type: ignore[no-untyped-def]
    choice, ROWS: tl.constexpr, GROUPS_PADDED: tl.constexpr, PADDED: tl.constexpr,
    TOP_GROUPS: tl.constexpr, TOP2: tl.constexpr,
):  # fmt: skip
    """Returns choice [ROWS, GROUPS_PADDED PADDED] with -inf outside the best groups."""
    grouped = tl.reshape(choice, [ROWS, GROUPS_PADDED, PADDED])
    score = tl.max(grouped, axis=2)
    if TOP2:
        first = tl.argmax(grouped, axis=2)
        places = tl.arange(0, PADDED)[None, None, :]
        score += tl.max(tl.where(places == first[:, :, None], float("-inf"), grouped), axis=2)
    groups = tl.arange(0, GROUPS_PADDED)[None, :]
    kept = tl.zeros([ROWS, GROUPS_PADDED], dtype=tl.int32)
    for _ in tl.static_range(TOP_GROUPS):
        hit = groups == tl.argmax(score, axis=1)[:, None]
        kept = tl.where(hit, 1, kept)
        score = tl.where(hit, float("-inf"), score)
    grouped = tl.where(kept[:, :, None] != 0, grouped, float("-inf"))
    return tl.reshape(grouped, [ROWS, GROUPS_PADDED * PADDED])


@triton.jit
def _select(  # type: ignore[no-untyped-def]
    logits, bias, weights, chosen, lines, tokens,
    ROWS: tl.constexpr, GROUPS: tl.constexpr, GROUP_SIZE: tl.constexpr, GROUPS_PADDED: tl.constexpr,
    PADDED: tl.constexpr, TOP_K: tl.constexpr, TOP_GROUPS: tl.constexpr, TOP2: tl.constexpr, SIGMOID: tl.constexpr,
    NORMALIZE: tl.constexpr, SCALE: tl.constexpr, HAS_BIAS: tl.constexpr, TOP_PADDED: tl.constexpr,
):  # fmt: skip
    """Writes choices and weights of the tokens `lines` from their logits [ROWS, columns]."""
    columns = tl.arange(0, GROUPS_PADDED * PADDED)
    experts = _row_of(columns, GROUP_SIZE, PADDED)
    real = (columns < GROUPS * PADDED) & (columns % PADDED < GROUP_SIZE)
    logits = tl.where(real[None, :], logits, float("-inf"))
    if SIGMOID:
        # near 1, a division that rounds differently from torch's would make different scores equal and change their
        # order
        scores = tl.div_rn(1.0, 1.0 + tl.exp(-logits))
    else:
        powers = tl.exp(logits - tl.max(logits, axis=1)[:, None])
        scores = powers / tl.sum(powers, axis=1)[:, None]
    choice = scores
    if HAS_BIAS:
        choice += tl.load(bias + experts, mask=real, other=0.0)[None, :]
    # a row of NaN still gets experts that exist
    choice = tl.where(real[None, :] & (choice == choice), choice, float("-inf"))
    if GROUPS > 1:
        choice = _in_groups(choice, ROWS, GROUPS_PADDED, PADDED, TOP_GROUPS, TOP2)
    places = tl.arange(0, TOP_PADDED)[None, :]
    best = tl.zeros([ROWS, TOP_PADDED], dtype=tl.int32)
    taken = tl.zeros([ROWS, TOP_PADDED], dtype=tl.float32)
    for k in tl.static_range(TOP_K):
        column = tl.argmax(choice, axis=1)
        hit = columns[None, :] == column[:, None]
        score = tl.sum(tl.where(hit, scores, 0.0), axis=1)
        best = tl.where(places == k, _row_of(column, GROUP_SIZE, PADDED)[:, None], best)
        taken = tl.where(places == k, score[:, None], taken)
        choice = tl.where(hit, float("-inf"), choice)
    if NORMALIZE:
        taken = taken / (tl.sum(taken, axis=1)[:, None] + 1e-20)
    there = lines.to(tl.int64)[:, None] * TOP_K + places
    keep = (lines < tokens)[:, None] & (places < TOP_K)
    tl.store(weights + there, taken * SCALE, mask=keep)
    tl.store(chosen + there, best, mask=keep)


@triton.jit(do_not_specialize=["tokens", "steps"])
def route(  # type: ignore[no-untyped-def]
    x, weight, bias, weights, chosen, partials, arrivals, tokens, inputs, x_stride, steps,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, ROWS: tl.constexpr, SPLITS: tl.constexpr, EVEN_K: tl.constexpr,
    GROUPS: tl.constexpr, GROUP_SIZE: tl.constexpr, GROUPS_PADDED: tl.constexpr, PADDED: tl.constexpr,
    TOP_K: tl.constexpr, TOP_GROUPS: tl.constexpr, TOP2: tl.constexpr, SIGMOID: tl.constexpr,
    NORMALIZE: tl.constexpr, SCALE: tl.constexpr, HAS_BIAS: tl.constexpr, TOP_PADDED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """weights and chosen [tokens, TOP_K] of BLOCK_M tokens.

    SPLITS programs take `steps` steps of BLOCK_K inputs each. The last one to end adds up the others' `partials` in a
    fixed order, and selects. ROWS: tokens that it does this for.
    """
    tile, split = tl.program_id(0), tl.program_id(1)
    width: tl.constexpr = GROUPS_PADDED * PADDED
    columns = tl.arange(0, width)
    experts = _row_of(columns, GROUP_SIZE, PADDED)
    real = (columns < GROUPS * PADDED) & (columns % PADDED < GROUP_SIZE)
    lines = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    acc = tl.zeros([BLOCK_M, width], dtype=tl.float32)
    if SPLITS > 1:
        w = _router(weight, experts, real, split * steps, inputs, BLOCK_K, False)
        wait(PDL)
        release(PDL)
        acc = _logits(acc, w, x, split * steps, lines, tokens, inputs, x_stride, BLOCK_K, False)
        for step in range(split * steps + 1, (split + 1) * steps):
            w = _router(weight, experts, real, step, inputs, BLOCK_K, False)
            acc = _logits(acc, w, x, step, lines, tokens, inputs, x_stride, BLOCK_K, False)
        places = tl.arange(0, BLOCK_M)[:, None] * width + columns[None, :]
        part = partials + (tile * SPLITS + split).to(tl.int64) * (BLOCK_M * width)
        tl.store(part + places, acc, mask=(lines < tokens)[:, None])
        # all threads write before one of them reports it
        tl.debug_barrier()
        if tl.atomic_add(arrivals + tile, 1, sem="acq_rel", scope="gpu") == SPLITS - 1:
            # reset the counter for the next launch
            tl.store(arrivals + tile, 0)
            some = tile * BLOCK_M + tl.arange(0, ROWS)
            there = tl.arange(0, ROWS)[:, None] * width + columns[None, :]
            logits = tl.zeros([ROWS, width], dtype=tl.float32)
            for other in tl.static_range(SPLITS):
                left = partials + (tile * SPLITS + other).to(tl.int64) * (BLOCK_M * width)
                # bypass the L1 cache, which does not see other multiprocessors' writes
                logits += tl.load(left + there, mask=(some < tokens)[:, None], other=0.0, cache_modifier=".cg")
            _select(logits, bias, weights, chosen, some, tokens,
                    ROWS, GROUPS, GROUP_SIZE, GROUPS_PADDED, PADDED, TOP_K, TOP_GROUPS, TOP2, SIGMOID,
                    NORMALIZE, SCALE, HAS_BIAS, TOP_PADDED)  # fmt: skip
    else:
        wait(PDL)
        release(PDL)
        for step in range(0, steps):
            w = _router(weight, experts, real, step, inputs, BLOCK_K, EVEN_K)
            acc = _logits(acc, w, x, step, lines, tokens, inputs, x_stride, BLOCK_K, EVEN_K)
        _select(acc, bias, weights, chosen, lines, tokens,
                BLOCK_M, GROUPS, GROUP_SIZE, GROUPS_PADDED, PADDED, TOP_K, TOP_GROUPS, TOP2, SIGMOID,
                NORMALIZE, SCALE, HAS_BIAS, TOP_PADDED)  # fmt: skip
