"""moe.route: the router's product, scores and the best experts in one launch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from llmcore.api import OpContext

from llmcore_triton import tuned
from llmcore_triton.launch import Bound, overlaps, place
from llmcore_triton.linear_shapes import buffer, power_of_two
from llmcore_triton.moe.route_kernel import route
from llmcore_triton.rows import size
from llmcore_triton.specs.moe import NAME

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
