"""moe.fused for few tokens. One token: route, gate and up, then down with the weighted sum, without tensor cores.

Up to 16 tokens: route, gate and up, down, combine. A tile of an expert has room for all tokens, so nothing is sorted.
Further programs and terms of the same launches compute the experts that every token sees. More tokens go through the
separate ops, as they do if this kernel is not chosen.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import torch
from llmcore.api import OpContext, RouteSpec
from llmcore.layers import Op

from llmcore_triton import tuned
from llmcore_triton.launch import Bound, overlaps
from llmcore_triton.linear_shapes import by_torch, power_of_two
from llmcore_triton.moe import combine, dispatch, experts, route
from llmcore_triton.moe.experts import Boxes, Tile, Weight, form, numbers_in, of, width
from llmcore_triton.moe.experts_kernels import unsorted
from llmcore_triton.moe.token_kernels import down_of_token, gate_up_of_token
from llmcore_triton.rows import size
from llmcore_triton.specs.rows import NAME

MOST = 16
"""Tokens that fit into one tile."""

Shared = tuple[torch.Tensor, torch.Tensor]
"""gate_up [2 width, size] and down [size, width] of the expert that every token sees."""

_ROUTE = (*(field.name for field in fields(RouteSpec)), "bias", "size")
_PARTS = {
    "moe.route": _ROUTE,
    "moe.dispatch": ("experts", "top_k"),
    "moe.experts": ("experts", "top_k", "size", "inner", "codes", "group", "zeros", "scale_type"),
    "moe.combine": ("top_k", "size"),
}
"""The sizes in each part's context."""


def part(context: OpContext, op: str) -> OpContext:
    """Returns the context of a part. The given context has the shape of moe.fused, or of one with quantized experts,
    whose part `moe.experts` is named alike."""
    name = context.op.replace("fused", "experts") if op == "moe.experts" else op
    return replace(context, op=name, shape={name: context.shape[name] for name in _PARTS[op] if name in context.shape})


class OneToken:
    """Gate and up of the token's choices, and the weighted sum of their downs."""

    def __init__(self, context: OpContext, config: Mapping[str, Any]) -> None:
        width, inner, self._top_k = (size(context, name) for name in ("size", "inner", "top_k"))
        self._shared = int(context.shape.get("shared") or 0)
        self._gate_up, block_n, _ = self._bound(
            gate_up_of_token, context, config["gate_up"], (inner, self._shared), (width,), SHARED=self._shared > 0
        )
        self._gate_up_tiles = -(-self._shared // block_n) + self._top_k * -(-inner // block_n)
        self._down, block_n, steps = self._bound(
            down_of_token, context, config["down"], (width,), (inner, self._shared), EARLY=config["early"]
        )
        self._down = self._down.but(STEPS=steps[0], SHARED_STEPS=steps[1])
        self._down_tiles = -(-width // block_n)

    def _bound(
        self,
        kernel: Any,
        context: OpContext,
        block: Sequence[int],
        outputs: tuple[int, ...],
        inputs: tuple[int, ...],
        **fixed: Any,
    ) -> tuple[Bound, int, tuple[int, ...]]:
        """Returns a launch in blocks of these outputs and inputs, the outputs of a block, and the steps for each of
        `inputs`."""
        overlap, (block_n, block_k, warps) = overlaps(context), block
        block_k = min(block_k, power_of_two(inputs[0]))
        launch = Bound(
            kernel,
            TOP_K=self._top_k,
            BLOCK_N=block_n,
            BLOCK_K=block_k,
            EVEN=all(n % block_n == 0 for n in outputs) and all(n % block_k == 0 for n in inputs),
            PDL=overlap,
            num_warps=warps,
            launch_pdl=overlap,
            **fixed,
        )
        return launch, block_n, tuple(-(-n // block_k) for n in inputs)

    def __call__(
        self,
        x: torch.Tensor,
        weights: torch.Tensor,
        chosen: torch.Tensor,
        gate_up: torch.Tensor,
        down: torch.Tensor,
        extra: torch.Tensor | None,
        shared: Shared | None,
    ) -> torch.Tensor:
        """x [1, size] -> [1, size]."""
        width, inner = down.shape[1:]
        both, seen = (gate_up, down) if shared is None else shared
        middle, out = x.new_empty(self._top_k * inner + self._shared), x.new_empty(1, width)
        self._gate_up((self._gate_up_tiles,), x, gate_up, both, chosen, middle, inner, self._shared, width)
        added = x if extra is None else extra
        self._down.but(EXTRA=extra is not None)(
            (self._down_tiles,), middle, down, seen, chosen, weights, added, out, width, inner, self._shared
        )
        return out


class Unsorted:
    """Gate and up (`gated`), or down, of up to MOST tokens, without an order of the pairs."""

    def __init__(self, context: OpContext, tile: Tile, tma: bool, gated: bool) -> None:
        coded = numbers_in(context) > 1
        self._tile, self._experts = tile, size(context, "experts")
        self._width = width(context, tile, gated)
        self._boxes = Boxes(context, tile, tma and not (gated and coded))
        self._shared_boxes = Boxes(context, tile, tma)
        self._launch = Bound(
            unsorted,
            TOP_K=size(context, "top_k"),
            GATED=gated,
            BLOCK_M=MOST,
            BLOCK_N=tile.block_n,
            BLOCK_K=tile.block_k,
            **form(context, gated),
            **tile.options(context, gated),
        )

    def __call__(
        self,
        x: torch.Tensor,
        weight: Weight,
        out: torch.Tensor,
        chosen: torch.Tensor,
        shared: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None,
    ) -> None:
        """x [tokens or pairs, inputs], weight [experts, outputs or twice as many, inputs] -> out [pairs, outputs].
        `shared`: x, weight and out of the expert that every token sees."""
        held, marks = of(weight)
        (pairs, outputs), inputs, tile = out.shape, x.shape[1], self._tile
        by_pair, even = pairs <= self._experts, inputs % tile.block_k == 0
        programs = (pairs if by_pair else self._experts) * -(-outputs // self._width)
        also_x, also_weight, also_out = (x, held, out) if shared is None else shared
        box = None
        if shared is not None:
            box = self._shared_boxes(also_weight.unsqueeze(0))
            programs += -(-also_out.shape[1] // tile.block_n)
            even = even and also_x.shape[1] % tile.block_k == 0
        self._launch.but(EVEN_K=even, BY_PAIR=by_pair, SHARED=shared is not None)(
            (programs,),
            *(x, held, self._boxes(held), marks, out),
            *(also_x, also_weight, box, also_out, chosen, len(chosen)),
            *(outputs, inputs, x.stride(0), also_out.shape[1], also_x.shape[1], also_x.stride(0)),
        )


class FewTokens:
    """The experts of up to MOST tokens, and the weighted sum."""

    def __init__(self, context: OpContext, config: Mapping[str, Any]) -> None:
        self._width, self._inner = size(context, "size"), size(context, "inner")
        self._gate_up = Unsorted(context, Tile(*config["gate_up"]), config["tma"], gated=True)
        self._down = Unsorted(context, Tile(*config["down"]), config["tma"], gated=False)
        self._combine = combine.make(part(context, "moe.combine"))

    def __call__(
        self,
        x: torch.Tensor,
        weights: torch.Tensor,
        chosen: torch.Tensor,
        gate_up: Weight,
        down: Weight,
        extra: torch.Tensor | None,
        shared: Shared | None,
    ) -> torch.Tensor:
        """x [T, size] -> [T, size]."""
        middle, y = x.new_empty(chosen.numel(), self._inner), x.new_empty(chosen.numel(), self._width)
        if shared is None:
            self._gate_up(x, gate_up, middle, chosen, None)
            self._down(middle, down, y, chosen, None)
        else:
            both, seen = shared
            also, result = x.new_empty(len(x), seen.shape[1]), x.new_empty(len(x), self._width)
            self._gate_up(x, gate_up, middle, chosen, (x, both, also))
            self._down(middle, down, y, chosen, (also, seen, result))
            extra = result if extra is None else extra + result
        combined: torch.Tensor = self._combine(y, weights, extra)
        return combined


class Fused:
    """The op, from what computes the experts of one token, those of a few, and those of sorted tokens."""

    def __init__(self, context: OpContext, one: Op, few: Op, many: Op) -> None:
        self._one, self._few, self._experts = one, few, many
        self._coded = numbers_in(context) > 1
        self._route = route.make(part(context, "moe.route"))
        self._dispatch = dispatch.make(part(context, "moe.dispatch"))
        self._combine = combine.make(part(context, "moe.combine"))

    def __call__(
        self,
        x: torch.Tensor,
        router: torch.Tensor,
        bias: torch.Tensor | None,
        gate_up: Weight,
        down: Weight,
        extra: torch.Tensor | None = None,
        shared: Shared | None = None,
    ) -> torch.Tensor:
        """Returns [T, size] from
        - x [T, size], router [experts, size], bias [experts] f32 or None
        - gate_up [experts, 2 inner, size], down [experts, size, inner]
        - extra [T, size] or None, added to the sum
        - shared, the weights of a gated MLP, or None; its result is added, too"""
        tokens = len(x)
        weights, chosen = self._route(x, router, bias)
        if shared is not None and (tokens > MOST or self._coded):
            seen = by_torch(by_torch(x, shared[0], None, True), shared[1], None, False)
            extra, shared = seen if extra is None else extra + seen, None
        if tokens > MOST:
            y = self._experts(self._dispatch(x, chosen), gate_up, down)
            combined: torch.Tensor = self._combine(y, weights, extra)
            return combined
        few = self._one if tokens == 1 else self._few
        found: torch.Tensor = few(x, weights, chosen, gate_up, down, extra, shared)
        return found


_ONE: Mapping[str, Any] = {"gate_up": [1, 1024, 2], "down": [2, 512, 4], "early": True}
"""A row or two of weights per program, with as many loads in flight as the threads have registers for."""


def _few(context: OpContext) -> dict[str, Any]:
    tiles = experts.default(replace(part(context, "moe.experts"), bucket=1))
    return {name: [MOST, *tile[1:]] if isinstance(tile, list) else tile for name, tile in tiles.items()}


def default(context: OpContext) -> dict[str, Any]:
    """`gate_up` and `down`: outputs and inputs of a block, and warps, for one token; Tiles for more. `early`: down's
    first block loads while gate and up end."""
    return dict(_ONE) if context.bucket == 0 else _few(context)


def candidates(context: OpContext) -> Iterator[dict[str, Any]]:
    """Configurations worth timing: for one token those near _ONE, and pairs of blocks."""
    if context.bucket == 0:
        blocks = ((1, 512, 2), (1, 1024, 2), (1, 1024, 4), (2, 512, 2), (2, 1024, 4), (1, 2048, 4), (2, 1024, 2))
        downs = ((1, 256, 1), (1, 512, 2), (2, 256, 2), (1, 1024, 2), (2, 512, 4), (2, 256, 4), (2, 512, 2))
        found = [{**_ONE, "gate_up": list(block)} for block in blocks]
        found += [{**_ONE, "down": list(down), "early": early} for down in downs for early in (False, True)]
        pairs = zip(blocks, downs, strict=True)
        found += [{"gate_up": list(block), "down": list(down), "early": True} for block, down in pairs]
        yield from (config for index, config in enumerate(found) if config not in found[:index])
    else:
        for config in experts.candidates(part(context, "moe.experts")):
            if config["gate_up"][0] == MOST:
                yield config


def make_with(context: OpContext, config: Mapping[str, Any]) -> Fused:
    """The op in the configuration `config`, which is for the context's own bucket."""
    config = {**default(context), **config}
    one = OneToken(context, config if context.bucket == 0 else _ONE)
    few = FewTokens(context, config if context.bucket == 1 else _few(context))
    return Fused(context, one, few, experts.make(part(context, "moe.experts")))


def make(context: OpContext) -> Fused:
    """The op in the fastest measured configuration, or in the default one."""
    return make_with(context, tuned.choose(NAME, context, {}))
