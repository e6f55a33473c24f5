"""moe.route in two launches: the router's product, and each token's scores and best experts.

Programs of the first one may share a product's inputs. Those of the second one add up their parts, a token each. So
one token with 128 experts takes 3.3 us on an H200 (`scripts/tune.py`). A single launch, whose last program did both,
took 5.1 us when this one took 4.0.
"""

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

_TILE = 16
_STAGES = 3

_LEAST = tl.constexpr(-3.0e38)
"""Less than every score that is a number. Only columns without an expert have less."""


class Route:
    """The op for any number of tokens."""

    def __init__(self, context: OpContext, config: Mapping[str, Any]) -> None:
        shape, overlap = context.shape, overlaps(context)
        experts, groups = size(context, "experts"), int(shape.get("groups") or 1)
        self._top_k = size(context, "top_k")
        group = experts // groups
        groups_padded = power_of_two(groups)
        padded = max(power_of_two(group), _TILE // groups_padded)
        self._config, self._columns = config, groups_padded * padded
        columns = {"GROUPS": groups, "GROUP_SIZE": group, "GROUPS_PADDED": groups_padded, "PADDED": padded}
        self._multiply = Bound(
            router,
            BLOCK_M=config["block_m"],
            BLOCK_K=config["block_k"],
            **columns,
            PDL=overlap,
            num_warps=config["warps"],
            num_stages=_STAGES,
            launch_pdl=overlap,
        )
        # memory that no other call gets while `select` reads it: `gate_up_of_token` writes before its wait
        self._few = buffer(place(context), torch.float32, config["splits"] * _TILE * self._columns)
        self._select = Bound(
            select,
            SPLITS=config["splits"],
            **columns,
            TOP_K=self._top_k,
            TOP_GROUPS=int(shape.get("top_groups") or 1),
            TOP2=shape.get("group_score") == "top2",
            SIGMOID=shape.get("scoring") == "sigmoid",
            NORMALIZE=bool(shape.get("normalize")),
            SCALE=float(shape.get("scale") or 1.0),
            PDL=overlap,
            num_warps=1,
            launch_pdl=overlap,
        )

    def __call__(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x [T, size], weight [experts, size], bias [experts] f32 or None -> weights f32, experts int32 [T, top_k]."""
        tokens, inputs, config = len(x), weight.shape[1], self._config
        splits, block_k = config["splits"], config["block_k"]
        parts = self._few
        if tokens > _TILE:
            parts = torch.empty(splits * tokens * self._columns, dtype=torch.float32, device=x.device)
        weights = torch.empty((tokens, self._top_k), dtype=torch.float32, device=x.device)
        chosen = torch.empty((tokens, self._top_k), dtype=torch.int32, device=x.device)
        # programs without inputs write zeros
        steps = -(-inputs // (block_k * splits))
        self._multiply.but(EVEN_K=inputs % (block_k * splits) == 0)(
            (-(-tokens // config["block_m"]), splits),
            *(x, weight, parts, tokens, inputs, x.stride(0), steps),
        )
        self._select.but(HAS_BIAS=bias is not None)(
            (tokens,), parts, weight if bias is None else bias, weights, chosen, tokens
        )
        return weights, chosen


def default(context: OpContext) -> dict[str, Any]:
    """The default splits the inputs of few tokens over programs. Under `deterministic` no inputs are split."""
    if context.deterministic:
        block_k = 64 if context.dtype != "f32" else 32
        return {"block_m": _TILE, "block_k": block_k, "splits": 1, "warps": 4}
    splits = (16, 16, 8, 4, 1)[context.bucket]
    wide = size(context, "experts") > 128
    block_k = 32 if context.dtype == "f32" else 128 if splits > 4 and not wide else 64
    block_m, warps = 16 if splits > 1 else 32, 8 if wide else 4
    return {"block_m": block_m, "block_k": block_k, "splits": splits, "warps": warps}


def candidates(context: OpContext) -> Iterator[dict[str, Any]]:
    """Splits and tiles worth timing."""
    if context.deterministic:
        return
    base = default(context)
    yield base
    if base["splits"] == 1:
        shapes = [(m, k, 1, warps) for m in (16, 32, 64) for k in (64, 128) for warps in (4, 8)]
    else:
        splits = (8, 16, 32) if context.bucket < 2 else (2, 4, 8)
        shapes = [(16, k, parts, warps) for parts in splits for k in (64, 128) for warps in (2, 4, 8)]
    for block_m, block_k, parts, warps in shapes:
        config = {**base, "block_m": block_m, "block_k": block_k, "splits": parts, "warps": warps}
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
def _columns(GROUPS: tl.constexpr, GROUP_SIZE: tl.constexpr, GROUPS_PADDED: tl.constexpr, PADDED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns the expert of each column, and whether there is one. Each group of GROUP_SIZE experts has PADDED
    columns."""
    columns = tl.arange(0, GROUPS_PADDED * PADDED)
    real = (columns < GROUPS * PADDED) & (columns % PADDED < GROUP_SIZE)
    return columns // PADDED * GROUP_SIZE + columns % PADDED, real


@triton.jit
def _weights(weight, experts, real, step, inputs, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns one step's weights [columns, BLOCK_K]. Columns without an expert are zero."""
    ks = step * BLOCK_K + tl.arange(0, BLOCK_K)
    here = real[:, None]
    if not EVEN_K:
        here = here & (ks < inputs)[None, :]
    return tl.load(weight + experts[:, None] * inputs + ks[None, :], mask=here, other=0.0)


@triton.jit
def _added(  # type: ignore[no-untyped-def]
    acc, w, x, step, lines, tokens, inputs, x_stride, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr,
):  # fmt: skip
    """Returns acc [lines, columns] with the products of one step's x and w [columns, BLOCK_K] added."""
    ks = step * BLOCK_K + tl.arange(0, BLOCK_K)
    here = (lines < tokens)[:, None]
    if not EVEN_K:
        here = here & (ks < inputs)[None, :]
    xs = tl.load(x + lines.to(tl.int64)[:, None] * x_stride + ks[None, :], mask=here, other=0.0)
    # a router in f32 gets the activations in f32
    if x.dtype.element_ty != w.dtype:
        xs, w = xs.to(tl.float32), w.to(tl.float32)
    return tl.dot(xs, tl.trans(w), acc, input_precision="ieee")


@triton.jit(do_not_specialize=["tokens", "steps"])
def router(  # type: ignore[no-untyped-def]
    x, weight, parts, tokens, inputs, x_stride, steps,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr,
    GROUPS: tl.constexpr, GROUP_SIZE: tl.constexpr, GROUPS_PADDED: tl.constexpr, PADDED: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """parts [splits, tokens, columns] = x weight^T over the inputs of each split. Program (tile of BLOCK_M tokens,
    split). A split is `steps` steps of BLOCK_K inputs."""
    tile, split = tl.program_id(0), tl.program_id(1)
    width: tl.constexpr = GROUPS_PADDED * PADDED
    experts, real = _columns(GROUPS, GROUP_SIZE, GROUPS_PADDED, PADDED)
    lines = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    acc = tl.zeros([BLOCK_M, width], dtype=tl.float32)
    w = _weights(weight, experts, real, split * steps, inputs, BLOCK_K, EVEN_K)
    wait(PDL)
    # not before: `gate_up_of_token`, two kernels on, reads what x is read from before its own wait
    release(PDL)
    acc = _added(acc, w, x, split * steps, lines, tokens, inputs, x_stride, BLOCK_K, EVEN_K)
    for step in range(split * steps + 1, (split + 1) * steps):
        w = _weights(weight, experts, real, step, inputs, BLOCK_K, EVEN_K)
        acc = _added(acc, w, x, step, lines, tokens, inputs, x_stride, BLOCK_K, EVEN_K)
    there = (split * tokens + lines).to(tl.int64)[:, None] * width + tl.arange(0, width)[None, :]
    tl.store(parts + there, acc, mask=(lines < tokens)[:, None])


@triton.jit
def _in_groups(  # type: ignore[no-untyped-def]
    choice, GROUPS_PADDED: tl.constexpr, PADDED: tl.constexpr, TOP_GROUPS: tl.constexpr, TOP2: tl.constexpr,
):  # fmt: skip
    """Returns choice [GROUPS_PADDED PADDED] with at most _LEAST outside the best groups."""
    grouped = tl.reshape(choice, [GROUPS_PADDED, PADDED])
    score = tl.max(grouped, axis=1)
    if TOP2:
        first = tl.argmax(grouped, axis=1)
        places = tl.arange(0, PADDED)[None, :]
        score += tl.max(tl.where(places == first[:, None], float("-inf"), grouped), axis=1)
    kept = _place(score, TOP_GROUPS) < TOP_GROUPS
    return tl.reshape(tl.where(kept[:, None], grouped, tl.minimum(grouped, _LEAST)), [GROUPS_PADDED * PADDED])


@triton.jit
def _place(score, COUNT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns the places of the COUNT best scores [N], and COUNT for the others. Of equal scores the first is better.

    They are found one after the other. Comparing all pairs at once took 54 % longer for more than 256 tokens and 128
    experts (`scripts/tune.py` on an H200). For one token `select` then took 0.2 us less of a step than turns by argmax
    did (`step_kernels.py`). These turns by integers take a third fewer instructions than turns by argmax.
    """
    columns = tl.arange(0, score.shape[0])
    place = tl.full(score.shape, COUNT, dtype=tl.int32)
    # integers in the order of the scores, of which a warp finds the largest by one instruction
    bits = score.to(tl.int32, bitcast=True)
    left = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    for turn in tl.static_range(COUNT):
        best = left == tl.max(left, axis=0)
        hit = columns == tl.min(tl.where(best, columns, score.shape[0]), axis=0)
        place = tl.where(hit, turn, place)
        left = tl.where(hit, -0x80000000, left)
    return place


@triton.jit(do_not_specialize=["tokens"])
def select(  # type: ignore[no-untyped-def]
    parts, bias, weights, chosen, tokens,
    SPLITS: tl.constexpr, GROUPS: tl.constexpr, GROUP_SIZE: tl.constexpr, GROUPS_PADDED: tl.constexpr,
    PADDED: tl.constexpr, TOP_K: tl.constexpr, TOP_GROUPS: tl.constexpr, TOP2: tl.constexpr, SIGMOID: tl.constexpr,
    NORMALIZE: tl.constexpr, SCALE: tl.constexpr, PDL: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """weights and chosen [tokens, TOP_K], a token for each program, from `parts` of `router`."""
    release(PDL)
    token = tl.program_id(0).to(tl.int64)
    width: tl.constexpr = GROUPS_PADDED * PADDED
    columns = tl.arange(0, width)
    experts, real = _columns(GROUPS, GROUP_SIZE, GROUPS_PADDED, PADDED)
    offset = 0.0
    if HAS_BIAS:
        offset = tl.load(bias + experts, mask=real, other=0.0)
    wait(PDL)
    rows = tl.arange(0, SPLITS).to(tl.int64) * tokens + token
    logits = tl.sum(tl.load(parts + rows[:, None] * width + columns[None, :]), axis=0)
    logits = tl.where(real, logits, float("-inf"))
    if SIGMOID:
        # near 1, a division that rounds differently from torch's would make different scores equal and change their
        # order
        scores = tl.div_rn(1.0, 1.0 + tl.exp(-logits))
    else:
        powers = tl.exp(logits - tl.max(logits, axis=0))
        scores = powers / tl.sum(powers, axis=0)
    choice = scores + offset
    # a row of NaN still gets experts that exist
    choice = tl.where(real, tl.where(choice == choice, choice, _LEAST), float("-inf"))
    if GROUPS > 1:
        choice = _in_groups(choice, GROUPS_PADDED, PADDED, TOP_GROUPS, TOP2)
    place = _place(choice, TOP_K)
    best = real & (place < TOP_K)
    if NORMALIZE:
        scores = scores / (tl.sum(tl.where(best, scores, 0.0), axis=0) + 1e-20)
    there = token * TOP_K + place
    tl.store(weights + there, scores * SCALE, mask=best)
    tl.store(chosen + there, experts, mask=best)
