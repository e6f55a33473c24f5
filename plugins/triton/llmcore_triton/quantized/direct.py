"""linear.w4a16, linear.w8a16 and both with silu_and_mul, kernel direct: packed weights for up to 16 tokens, in Gluon.

Words go from memory to the registers in which tensor cores multiply them, and programs share no sums (see
direct_kernel). Equal calls give equal bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from llmcore.api import OpContext

from llmcore_triton import tuned
from llmcore_triton.launch import Bound, overlaps
from llmcore_triton.linear_shapes import is_gated, registers_of
from llmcore_triton.quantized.direct_kernel import WORDS, words_times_tokens
from llmcore_triton.quantized.packing import Packed, Packing

KERNEL = "direct"

DEFAULT = {"rows": 16, "warps": 8, "ahead": 2, "per_processor": 2}
"""`rows`: outputs of a program, 16 or 32. `warps` share its inputs. Each has the words of `ahead` blocks in flight.
`per_processor`: programs whose registers a multiprocessor has room for."""

PADDED = (8, 16)
"""Token counts of a program that kernels are compiled for. More tokens read all weights again."""


class Direct(Packed):
    """The op, bound to sizes and a configuration. It takes canonical and packed tensors.

    Raises ValueError for shapes whose blocks of inputs do not have WORDS words, or are not whole.
    """

    def __init__(self, context: OpContext, config: Mapping[str, Any]) -> None:
        super().__init__(context)
        form, blocks, inputs = self._form, self._form.blocks, self._sizes.inputs
        if blocks.words != WORDS.value or inputs % blocks.inputs:
            raise ValueError(f"needs whole blocks of {WORDS.value} words, and {form.name} fit {inputs} inputs")
        self._rows = config["rows"]
        overlap = overlaps(context)
        self._launch = Bound(
            words_times_tokens,
            **{"ROWS": config["rows"], "CODES": context.shape["codes"], "GROUP_SIZE": form.group, "ALIKE": form.alike},
            **{"ZEROS": bool(context.shape["zeros"]), "SCALE": context.shape["scale"], "GATED": self._gated},
            **{"BLOCKS": blocks.total, "AHEAD": ahead_of(config, blocks.total), "PDL": overlap},
            **{"num_warps": config["warps"], "launch_pdl": overlap, "maxnreg": registers(config)},
        )

    def multiply(
        self, x: torch.Tensor, words: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """See Packed."""
        tokens, outputs = x.shape[0], self._sizes.outputs
        padded = PADDED[tokens > PADDED[0]]
        out = x.new_empty(tokens, outputs)
        self._launch.but(TOKENS=padded, HAS_BIAS=bias is not None)(
            (-(-outputs // self._rows), -(-tokens // padded)),
            *(x, words, scale, out if bias is None else bias, out, tokens, outputs, x.stride(0)),
        )
        return out


def ahead_of(config: Mapping[str, Any], blocks: int) -> int:
    """Returns the blocks that a warp loads before it multiplies, if a row has `blocks`."""
    return int(min(config["ahead"], -(-blocks // config["warps"])))


def registers(config: Mapping[str, Any]) -> int:
    """Returns the registers that a thread can have. Without this limit the compiler would load x late to save some."""
    return registers_of(32 * config["warps"] * config["per_processor"])


def make_with(context: OpContext, config: Mapping[str, Any]) -> Direct:
    """The op in the configuration `config`."""
    return Direct(context, {**DEFAULT, **config})


def make(context: OpContext) -> Direct:
    """The op in the fastest measured configuration, or in the default one."""
    return make_with(context, tuned.choose(KERNEL, context, DEFAULT))


NAMES = tuple(DEFAULT)
_PLAIN = (
    (16, 8, 2, 2),
    (16, 8, 1, 3),
    (16, 8, 1, 2),
    (16, 4, 2, 4),
    (16, 4, 1, 5),
    (16, 16, 1, 1),
    (32, 8, 1, 2),
    (32, 16, 1, 1),
)
_GATED = (
    (16, 8, 2, 2),
    (16, 8, 1, 2),
    (16, 8, 2, 1),
    (16, 4, 1, 4),
    (16, 4, 1, 3),
    (16, 4, 2, 3),
    (16, 4, 2, 2),
    (16, 16, 1, 1),
)
"""Configurations, by NAMES. Compiled for sm_90 they spill no or few registers. Gate and up need twice as many."""


def candidates(context: OpContext) -> Iterator[dict[str, Any]]:
    """Configurations worth timing."""
    blocks, seen = Packing(context).blocks.total, []
    for values in _GATED if is_gated(context) else _PLAIN:
        config = dict(zip(NAMES, values, strict=True))
        fitted = {**config, "ahead": ahead_of(config, blocks)}
        if fitted not in seen:
            seen.append(fitted)
            yield fitted
