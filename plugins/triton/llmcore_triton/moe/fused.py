"""moe.fused for few tokens. One: route, gate and up, down with the weighted sum in it; no tensor cores, no order.

Up to 16: route, gate and up, down, combine; a tile of an expert has room for all tokens, so nothing is sorted. More
tokens go through the parts, as they do where this kernel is not chosen.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from llmcore.api import OpContext

from llmcore_triton import tuned
from llmcore_triton.launch import Bound, overlaps
from llmcore_triton.linear_shapes import power_of_two
from llmcore_triton.moe import combine, dispatch, experts, route
from llmcore_triton.moe.experts import Boxes, Tile
from llmcore_triton.moe.experts_kernels import unsorted
from llmcore_triton.moe.token_kernels import down_of_token, gate_up_of_token
from llmcore_triton.rows import size
from llmcore_triton.specs.moe import NAME

MOST = 16
"""Tokens that one tile has room for."""

_ROUTE = ("experts", "top_k", "scoring", "normalize", "scale", "groups", "top_groups", "group_score", "bias", "size")
_PARTS = {
    "moe.route": _ROUTE,
    "moe.dispatch": ("experts", "top_k"),
    "moe.experts": ("experts", "top_k", "size", "inner"),
    "moe.combine": ("top_k", "size"),
}
"""The sizes each part is asked for with."""


def part(context: OpContext, op: str) -> OpContext:
    """What a part is made for; the context's own shape is that of moe.fused."""
    return replace(context, op=op, shape={name: context.shape[name] for name in _PARTS[op] if name in context.shape})


class OneToken:
    """Gate and up of its choices, and the weighted sum of their downs."""

    def __init__(self, context: OpContext, config: Mapping[str, Any]) -> None:
        width, inner, self._top_k = (size(context, name) for name in ("size", "inner", "top_k"))
        overlap = overlaps(context)
        launches = []
        for kernel, name, outputs, inputs in (
            (gate_up_of_token, "gate_up", inner, width),
            (down_of_token, "down", width, inner),
        ):
            block_n, block_k, warps = config[name]
            block_k = min(block_k, power_of_two(inputs))
            fixed: dict[str, Any] = {
                "BLOCK_N": block_n,
                "BLOCK_K": block_k,
                "EVEN": outputs % block_n == 0 and inputs % block_k == 0,
                "PDL": overlap,
                "num_warps": warps,
                "launch_pdl": overlap,
            }
            if name == "down":
                fixed |= {"TOP_K": self._top_k, "STEPS": -(-inputs // block_k), "EARLY": config["early"]}
            launches.append((Bound(kernel, **fixed), -(-outputs // block_n)))
        (self._gate_up, self._gate_up_tiles), (self._down, self._down_tiles) = launches

    def __call__(
        self,
        x: torch.Tensor,
        weights: torch.Tensor,
        chosen: torch.Tensor,
        gate_up: torch.Tensor,
        down: torch.Tensor,
        extra: torch.Tensor | None,
    ) -> torch.Tensor:
        """x [1, size] -> [1, size]."""
        width, inner = down.shape[1:]
        middle, out = x.new_empty(self._top_k, inner), x.new_empty(1, width)
        self._gate_up((self._gate_up_tiles, self._top_k), x, gate_up, chosen, middle, inner, width)
        self._down.but(EXTRA=extra is not None)(
            (self._down_tiles,), middle, down, chosen, weights, x if extra is None else extra, out, width, inner
        )
        return out


class Unsorted:
    """Gate and up (`gated`), or down, of up to MOST tokens, without an order of the pairs."""

    def __init__(self, context: OpContext, tile: Tile, tma: bool, gated: bool) -> None:
        self._tile, self._boxes, self._experts = tile, Boxes(context, tile, tma), size(context, "experts")
        overlap = overlaps(context)
        self._launch = Bound(
            unsorted,
            TOP_K=size(context, "top_k"),
            GATED=gated,
            BLOCK_M=MOST,
            BLOCK_N=tile.block_n,
            BLOCK_K=tile.block_k,
            PDL=overlap,
            num_warps=tile.warps,
            num_stages=min(tile.stages, experts.most_stages(context, tile, gated)),
            launch_pdl=overlap,
        )

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, chosen: torch.Tensor) -> None:
        """x [tokens or pairs, inputs], weight [experts, outputs or twice as many, inputs] -> out [pairs, outputs]."""
        (pairs, outputs), inputs, tile = out.shape, x.shape[1], self._tile
        by_pair = pairs <= self._experts
        self._launch.but(EVEN_K=inputs % tile.block_k == 0, BY_PAIR=by_pair)(
            ((pairs if by_pair else self._experts) * -(-outputs // tile.block_n),),
            *(x, weight, self._boxes(weight), out, chosen, len(chosen), outputs, inputs, x.stride(0)),
        )


class FewTokens:
    """The experts of up to MOST tokens, and the weighted sum."""

    def __init__(self, context: OpContext, config: Mapping[str, Any]) -> None:
        self._gate_up = Unsorted(context, Tile(*config["gate_up"]), config["tma"], gated=True)
        self._down = Unsorted(context, Tile(*config["down"]), config["tma"], gated=False)
        self._combine = combine.make(part(context, "moe.combine"))

    def __call__(
        self,
        x: torch.Tensor,
        weights: torch.Tensor,
        chosen: torch.Tensor,
        gate_up: torch.Tensor,
        down: torch.Tensor,
        extra: torch.Tensor | None,
    ) -> torch.Tensor:
        """x [T, size] -> [T, size]."""
        width, inner = down.shape[1:]
        middle, y = x.new_empty(chosen.numel(), inner), x.new_empty(chosen.numel(), width)
        self._gate_up(x, gate_up, middle, chosen)
        self._down(middle, down, y, chosen)
        combined: torch.Tensor = self._combine(y, weights, extra)
        return combined


class Fused:
    """The op. `config` is for the context's own bucket."""

    def __init__(self, context: OpContext, config: Mapping[str, Any]) -> None:
        one = config if context.bucket == 0 else _one(context)
        few = config if context.bucket == 1 else _few(context)
        self._route = route.make(part(context, "moe.route"))
        self._one, self._few = OneToken(context, one), FewTokens(context, few)
        self._dispatch = dispatch.make(part(context, "moe.dispatch"))
        self._experts = experts.make(part(context, "moe.experts"))
        self._combine = combine.make(part(context, "moe.combine"))

    def __call__(
        self,
        x: torch.Tensor,
        router: torch.Tensor,
        bias: torch.Tensor | None,
        gate_up: torch.Tensor,
        down: torch.Tensor,
        extra: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """x [T, size], router [experts, size], bias [experts] f32 or None, gate_up [experts, 2 inner, size], down
        [experts, size, inner], extra [T, size] or None (added to the sum) -> [T, size].
        """
        tokens = len(x)
        weights, chosen = self._route(x, router, bias)
        if tokens > MOST:
            combined: torch.Tensor = self._combine(
                self._experts(self._dispatch(x, chosen), gate_up, down), weights, extra
            )
            return combined
        few = self._one if tokens == 1 else self._few
        return few(x, weights, chosen, gate_up, down, extra)


def _one(context: OpContext) -> dict[str, Any]:
    """A row of weights per program, as many loads on their way as threads have registers for."""
    return {"gate_up": [1, 1024, 2], "down": [1, 512, 2], "early": False}


def _few(context: OpContext) -> dict[str, Any]:
    tiles = experts.default(replace(part(context, "moe.experts"), bucket=1, deterministic=False))
    return {name: [MOST, *tile[1:]] if isinstance(tile, list) else tile for name, tile in tiles.items()}


def default(context: OpContext) -> dict[str, Any]:
    """`gate_up` and `down`: outputs and inputs of a block, and warps, for one token; Tiles for more. `early`: whether
    down's first block sets out while gate and up end.
    """
    return _one(context) if context.bucket == 0 else _few(context)


def candidates(context: OpContext) -> Iterator[dict[str, Any]]:
    """Configurations worth timing."""
    if context.bucket == 0:
        blocks = ((1, 512, 2), (1, 1024, 2), (1, 1024, 4), (2, 512, 2), (2, 1024, 4), (1, 2048, 4), (2, 1024, 2))
        downs = ((1, 256, 1), (1, 512, 2), (2, 256, 2), (1, 1024, 2), (2, 512, 4), (1, 2048, 4), (2, 512, 2))
        for block in blocks:
            yield {"gate_up": list(block), "down": [1, 512, 2], "early": False}
        for down in downs:
            for early in (False, True):
                yield {"gate_up": [1, 1024, 2], "down": list(down), "early": early}
        for block, down in zip(blocks, downs, strict=True):
            yield {"gate_up": list(block), "down": list(down), "early": True}
    elif context.bucket == 1:
        for config in experts.candidates(part(context, "moe.experts")):
            if config["gate_up"][0] == MOST:
                yield config
    else:
        yield {}


def make_with(context: OpContext, config: Mapping[str, Any]) -> Fused:
    """The op with one configuration."""
    return Fused(context, {**default(context), **config})


def make(context: OpContext) -> Fused:
    """The op with the configuration that was fastest, or the default."""
    return Fused(context, tuned.choose(NAME, context, default(context)))
