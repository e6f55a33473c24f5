"""linear.w4a16, linear.w8a16 and both with silu_and_mul, kernel warpgroups: packed weights on Hopper, in Gluon.

The next weights are converted while the tensor cores multiply (see warpgroups_kernel). Equal calls give equal bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from llmcore.api import TOKEN_BUCKETS, OpContext

from llmcore_triton import tuned
from llmcore_triton.launch import Bound, overlaps, place
from llmcore_triton.linear_shapes import (
    BARRIERS,
    TMA_ALIGNED,
    buffer,
    power_of_two,
    processors,
    registers_of,
    shared_bytes,
)
from llmcore_triton.quantized.in_gluon import Tiles
from llmcore_triton.quantized.packing import BITS, Packed
from llmcore_triton.quantized.warpgroups_kernel import SHARED_TILES, WORDS, words_by_warpgroups

KERNEL = "warpgroups"

DEFAULT: dict[str, Any] = {
    **{"rows": 128, "tokens": 128, "warps": 8, "flight": 2, "depth": 16, "joined": 2, "x_stages": 3, "w_stages": 6},
    **{"per_processor": 1, "step": 256, "group": 8},
}
"""A step multiplies `step` inputs of `rows` rows of the weight with at most `tokens` tokens (see `shapes`).
- `warps`: those that multiply. Four more have a place, and two of them copy.
- `per_processor`: programs on each multiprocessor.
- `group`: tiles of tokens that use the same weights before the next weights come.
- `flight`, `depth`, `joined` and the stages: see the kernel."""

_NARROW = (32, 64)
"""Token counts of tiles for calls with few tokens."""

_WIDE = 256
"""The tokens of a tile in configurations that also have other shapes of tiles."""

_RATES = {(128, 256): 1.0, (256, 128): 0.95, (128, 128): 0.8}
"""The speed at which these tiles are multiplied, by rows and tokens, fitted to times of an H200. Other configurations
have tiles of one shape."""

_JOINING = 1792
"""The inputs whose products take as long as adding parts of tiles, fitted to the same times."""

_GRANULE = 32
"""A call is cut as one with the next multiple of this number of tokens."""

_MOST_TOKENS = 32768
"""The first call compiles all kernels that calls with up to this number of tokens choose."""

_GRAPH = 512
"""The most tokens of a step that may be captured into a CUDA graph. Its buffers are made in advance, because a graph
must not own them."""

_COPYING = 4
"""Warps that have a place beside those that multiply."""

_SCRATCH = 2048
"""Bytes of shared memory in which a warp turns results."""


class Cut(NamedTuple):
    """The cut of a call into tiles of `rows` rows of the weight and `tokens` tokens.

    Each of the programs computes `whole` tiles alone. The steps of the remaining tiles are cut into shares of `steps`.
    """

    rows: int
    tokens: int
    programs: int
    whole: int
    steps: int


class Plan(NamedTuple):
    """A cut, its kernel, and the memory for parts of tiles."""

    cut: Cut
    launch: Bound
    partials: torch.Tensor
    arrivals: torch.Tensor


class Warpgroups(Packed):
    """The op, bound to a configuration.

    The first call also launches each kernel that later calls may choose. So they are compiled at the start, and no
    request waits for the compiler.
    """

    def __init__(self, context: OpContext, config: Mapping[str, Any]) -> None:
        super().__init__(context)
        self._config = config
        if self._form.blocks.words != WORDS.value:
            raise ValueError(f"needs blocks of {WORDS.value} words, and {self._form.name} fit the shape")
        if config["flight"] * config["depth"] > config["joined"] * WORDS.value:
            raise ValueError(
                f"{config} has more products in flight than a stage of inputs has, and would never free one"
            )
        self._k_steps = -(-self._form.blocks.total * self._form.blocks.inputs // config["step"])
        self._weights: dict[tuple[int, int], Tiles] = {}
        self._launches: dict[tuple[int, int], Bound] = {}
        self._plans: dict[int, Plan] = {}
        self._first = True
        for tokens in range(_GRANULE, _GRAPH + 1, _GRANULE):
            self._plan(tokens)

    def multiply(
        self, x: torch.Tensor, words: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """See Packed."""
        tokens, inputs = x.shape
        # the stride of a single row may be anything
        stride = x.stride(0) if tokens > 1 else inputs
        if (x.data_ptr() | stride * x.element_size()) % TMA_ALIGNED:
            x, stride = x.clone(memory_format=torch.contiguous_format), inputs
        if self._first:
            self._first = False
            first, last = TOKEN_BUCKETS[self._context.bucket]
            counts = range(first, (last or _MOST_TOKENS) + 1, _GRANULE)
            fewest = {self._cut(count)[:2]: count for count in reversed(counts)}
            for count in fewest.values():
                self._run(x.new_zeros(count, inputs), inputs, words, scale, bias)
        return self._run(x, stride, words, scale, bias)

    def _run(
        self, x: torch.Tensor, stride: int, words: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        tokens, inputs = x.shape
        (rows, padded, programs, whole, steps), launch, partials, arrivals = self._plan(tokens)
        out = x.new_empty(tokens, self._sizes.outputs)
        launch.but(HAS_BIAS=bias is not None)(
            (programs,),
            Tiles(x, [tokens, inputs], [stride, 1], [padded, WORDS.value], SHARED_TILES),
            *(self._tiles(words, rows), scale, out if bias is None else bias, out),
            *(partials, arrivals, tokens, *self._sizes, whole, steps),
        )
        return out

    def _tiles(self, words: torch.Tensor, rows: int) -> Tiles:
        """The descriptor of a weight. It is made once, because weights do not move."""
        found = self._weights.get((words.data_ptr(), rows))
        if found is None:
            box = [rows // (1 + self._gated), WORDS.value]
            found = Tiles(words, list(words.shape), [words.shape[1], 1], box, SHARED_TILES)
            self._weights[words.data_ptr(), rows] = found
        return found

    def _plan(self, tokens: int) -> Plan:
        granules = -(-tokens // _GRANULE)
        found = self._plans.get(granules)
        if found is None:
            cut = self._cut(tokens)
            parts = cut.programs if cut.steps % self._k_steps else 0
            where = place(self._context)
            found = self._plans[granules] = Plan(
                cut,
                self._launch(cut.rows, cut.tokens),
                buffer(where, torch.float32, power_of_two(max(parts * cut.rows * cut.tokens, 1))),
                buffer(where, torch.int32, power_of_two(max(2 * parts, 1))),
            )
        return found

    def _cut(self, tokens: int) -> Cut:
        return min(self.cuts(tokens), key=self._cost)

    def cuts(self, tokens: int) -> Iterator[Cut]:
        """Yields the ways to cut a call."""
        k_steps, most = self._k_steps, processors(self._context) * self._config["per_processor"]
        for rows, padded in shapes(self._config, tokens):
            tiles = -(-self._sizes.outputs // (rows // (1 + self._gated))) * -(-tokens // padded)
            turns = -(-tiles // most)
            yield Cut(rows, padded, -(-tiles // turns), turns - 1, k_steps)
            # shares have at least one tile, so that few programs share one
            whole = max(turns - 2, 0)
            steps = -(-(tiles - whole * most) * k_steps // most)
            yield Cut(rows, padded, most if whole else -(-tiles * k_steps // steps), whole, steps)

    def _cost(self, cut: Cut) -> float:
        """Returns about how long a call takes, in products of a multiprocessor."""
        inputs: int = (cut.whole * self._k_steps + cut.steps) * self._config["step"]
        if cut.steps % self._k_steps:
            inputs += _JOINING
        return inputs * cut.rows * cut.tokens / _RATES.get((cut.rows, cut.tokens), 1.0)

    def _launch(self, rows: int, padded: int) -> Bound:
        found = self._launches.get((rows, padded))
        if found is not None:
            return found
        context, config, form = self._context, self._config, self._form
        x_stages, w_stages = stages_of(context, config, rows, padded)
        overlap = overlaps(context)
        found = self._launches[rows, padded] = Bound(
            words_by_warpgroups,
            **{"TOKENS": padded, "ROWS": rows, "CODES": context.shape["codes"]},
            **{"GROUP_SIZE": form.group, "ALIKE": form.alike, "ZEROS": bool(context.shape["zeros"])},
            **{"SCALE": context.shape["scale"], "GATED": self._gated},
            **{"PARTS": config["step"] // WORDS.value, "K_STEPS": self._k_steps},
            **{"GROUP": config["group"], "JOINED": config["joined"], "X_STAGES": x_stages, "W_STAGES": w_stages},
            **{"FLIGHT": config["flight"], "DEPTH": config["depth"], "PDL": overlap},
            **{"num_warps": config["warps"], "launch_pdl": overlap, "maxnreg": registers(config)},
        )
        return found


def shapes(config: Mapping[str, Any], count: int) -> list[tuple[int, int]]:
    """Returns the tiles that a call with `count` tokens may be cut into: the rows of the weight, and the tokens."""
    rows, tokens = int(config["rows"]), int(config["tokens"])
    if tokens == _WIDE:
        return [(rows, tokens), (2 * rows, tokens // 2), (rows, tokens // 2)]
    return [(rows, next((few for few in _NARROW if count <= few < tokens), tokens))]


def stages_of(context: OpContext, config: Mapping[str, Any], rows: int, tokens: int) -> tuple[int, int]:
    """Returns the stages of inputs and of words that fit into shared memory, at least two each.

    Raises ValueError if they do not fit.
    """
    room = shared_bytes(context, config["per_processor"]) - BARRIERS - _SCRATCH * config["warps"]
    x = config["joined"] * tokens * WORDS.value * 2
    w = rows * config["step"] * BITS[str(context.shape["codes"])] // 8
    x_stages, w_stages = config["x_stages"], config["w_stages"]
    while x_stages * x + w_stages * w > room and w_stages > 2:
        w_stages -= 1
    while x_stages * x + w_stages * w > room and x_stages > 2:
        x_stages -= 1
    if x_stages * x + w_stages * w > room:
        raise ValueError(f"{config} needs more shared memory than a device of capability {context.device.capability}")
    return x_stages, w_stages


def registers(config: Mapping[str, Any]) -> int:
    """Returns the registers that a thread starts with if `per_processor` programs share a multiprocessor."""
    return registers_of(32 * (config["warps"] + _COPYING) * config["per_processor"])


_NAMES = ("rows", "tokens", "warps", "flight", "depth", "joined", "x_stages", "w_stages", "per_processor")

_SOME = (
    (256, 64, 8, 1, 32, 2, 4, 3, 1),
    (128, 64, 8, 1, 64, 2, 3, 3, 2),
    (64, 64, 4, 1, 32, 2, 3, 4, 2),
    (64, 64, 4, 1, 32, 2, 2, 3, 3),
    (128, 64, 4, 1, 32, 2, 3, 4, 2),
)
"""Configurations for 17 to 64 tokens, by _NAMES. With weights in 8 bits, shorter steps leave room for more stages, and
need fewer registers."""

_MOST = ((128, 256, 8, 1, 16, 1, 4, 4, 1), (128, 256, 8, 1, 32, 1, 4, 4, 1))
"""Those for more than 256."""

_MANY = (*_MOST, (128, 128, 8, 2, 16, 2, 3, 6, 1), (64, 128, 4, 1, 32, 1, 4, 4, 2))
"""Those between."""


def candidates(context: OpContext) -> Iterator[dict[str, Any]]:
    """Configurations worth timing."""
    for step in (128, 256) if BITS[str(context.shape["codes"])] == 8 else (256,):
        for values in {2: _SOME, 3: _MANY}.get(context.bucket, _MOST):
            yield dict(zip(_NAMES, values, strict=True), step=step)


def make_with(context: OpContext, config: Mapping[str, Any]) -> Warpgroups:
    """The op in the configuration `config`."""
    return Warpgroups(context, {**DEFAULT, **config})


def make(context: OpContext) -> Warpgroups:
    """The op in the fastest measured configuration, or in the default one."""
    return make_with(context, tuned.choose(KERNEL, context, DEFAULT))
