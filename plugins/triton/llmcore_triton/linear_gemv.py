"""linear and linear_silu_and_mul, kernel gemv: one token at a time, without tensor cores."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from llmcore.api import OpContext

from llmcore_triton import tuned
from llmcore_triton.launch import Bound, overlaps
from llmcore_triton.linear_kernels import gemv
from llmcore_triton.linear_shapes import by_torch, is_gated, power_of_two

KERNEL = "gemv"

DEFAULT = {"block_n": 2, "block_k": 1024, "warps": 2}

MOST = 16
"""More tokens than this go to torch, because each token reads all weights again."""


class Gemv:
    """The op, bound to a configuration."""

    def __init__(self, context: OpContext, config: Mapping[str, Any]) -> None:
        self._gated, self._config = is_gated(context), config
        overlap = overlaps(context)
        self._launch = Bound(gemv, GATED=self._gated, PDL=overlap, num_warps=config["warps"], launch_pdl=overlap)

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x [T, inputs], weight [outputs, inputs] -> [T, outputs], or half of that if the op is gated."""
        tokens, (rows, inputs) = x.shape[0], weight.shape
        if tokens > MOST:
            return by_torch(x, weight, bias, self._gated)
        outputs = rows // (1 + self._gated)
        block_n = self._config["block_n"]
        block_k = min(self._config["block_k"], power_of_two(inputs))
        out = x.new_empty(tokens, outputs)
        launch = self._launch.but(
            BLOCK_N=block_n,
            BLOCK_K=block_k,
            HAS_BIAS=bias is not None,
            EVEN_N=outputs % block_n == 0,
            EVEN_K=inputs % block_k == 0,
        )
        parts = (x, weight, weight if bias is None else bias, out, outputs, inputs, x.stride(0))
        launch((-(-outputs // block_n), tokens), *parts)
        return out


def make_with(context: OpContext, config: Mapping[str, Any]) -> Gemv:
    """The op in the configuration `config`."""
    return Gemv(context, {**DEFAULT, **config})


def make(context: OpContext) -> Gemv:
    """The op in the fastest measured configuration, or in the default one."""
    return make_with(context, tuned.choose(KERNEL, context, DEFAULT))


def candidates(context: OpContext) -> Iterator[dict[str, Any]]:
    """Configurations worth timing: 8 to 64 weights per thread and step, which fit into registers."""
    for warps in (2, 4, 8):
        for block_k in (512, 1024, 2048):
            for block_n in (1, 2, 4, 8):
                per_thread = (1 + is_gated(context)) * block_n * block_k // (32 * warps)
                if 16 <= per_thread <= 64:
                    yield {"block_n": block_n, "block_k": block_k, "warps": warps}
