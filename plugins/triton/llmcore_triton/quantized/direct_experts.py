"""moe.fused.w4a16, kernel direct: one token's experts, in Gluon. Words go from memory to the registers in which tensor
cores multiply them (see direct_kernel). Equal calls give equal bits.

In 8 bits it was not faster than kernel triton. For 2 to 16 tokens its many small programs took three times as long.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any

import torch
from llmcore.api import OpContext

from llmcore_triton import tuned
from llmcore_triton.launch import Bound, overlaps
from llmcore_triton.moe.experts import Weight, of
from llmcore_triton.moe.fused import Shared
from llmcore_triton.quantized.direct import KERNEL, NAMES, ahead_of, registers
from llmcore_triton.quantized.direct_experts_kernel import down_of_choices, gate_up_of_choices
from llmcore_triton.quantized.direct_kernel import WORDS
from llmcore_triton.quantized.experts import of_rows
from llmcore_triton.quantized.fused import Coded, around
from llmcore_triton.rows import size

Config = Mapping[str, Sequence[int]]
"""For gate and up and for down: outputs of a program, its warps, the blocks that each has in flight, and programs of a
multiprocessor. See direct.DEFAULT."""

DEFAULT: Config = {"gate_up": (16, 8, 1, 2), "down": (16, 8, 2, 2)}


class OneToken:
    """Gate and up of the token's choices, and the weighted sum of their downs."""

    def __init__(self, context: OpContext, config: Config) -> None:
        self._width, self._inner, self._top_k = (size(context, name) for name in ("size", "inner", "top_k"))
        self._rows = {name: given[0] for name, given in config.items()}
        self._gate_up = _bound(gate_up_of_choices, context, "size", config["gate_up"])
        self._down = _bound(down_of_choices, context, "inner", config["down"], self._top_k)

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
        """x [1, size], words -> [1, size]. Fused has added the `shared` expert to `extra`."""
        (first, first_marks), (second, second_marks) = of(gate_up), of(down)
        width, inner = self._width, self._inner
        middle, out = x.new_empty(self._top_k * inner), x.new_empty(1, width)
        programs = self._top_k * -(-inner // self._rows["gate_up"])
        self._gate_up((programs,), x, first, first_marks, chosen, middle, inner)
        added = x if extra is None else extra
        self._down.but(EXTRA=extra is not None)(
            (-(-width // self._rows["down"]),), middle, second, second_marks, chosen, weights, added, out, width
        )
        return out


def _bound(kernel: Any, context: OpContext, inputs: str, given: Sequence[int], choices: int = 0) -> Bound:
    """Returns a launch over rows of the inputs that the shape names so. `choices`: those that a program adds up, or 0.

    Raises ValueError for experts whose blocks of inputs do not have WORDS words, or are not whole.
    """
    form, config = of_rows(context, inputs), dict(zip(NAMES, given, strict=True))
    blocks, width, overlap = form.blocks, size(context, inputs), overlaps(context)
    if blocks.words != WORDS.value or width % blocks.inputs:
        raise ValueError(f"needs whole blocks of {WORDS.value} words, and {form.name} fit {width} inputs")
    total = max(choices, 1) * blocks.total
    return Bound(
        kernel,
        **{"ROWS": config["rows"], "CODES": context.shape["codes"], "ALIKE": form.alike},
        # sums of several experts meet in down, so their scales come before
        **{"GROUP_SIZE": form.group or width},
        **{"ZEROS": bool(context.shape["zeros"]), "SCALE": context.shape["scale_type"], "BLOCKS": blocks.total},
        **({"TOTAL": total} if choices else {}),
        **{"AHEAD": ahead_of(config, total), "PDL": overlap, "num_warps": config["warps"], "launch_pdl": overlap},
        maxnreg=registers(config),
    )


_GATE_UP = ((16, 8, 1, 2), (16, 4, 1, 4), (16, 4, 2, 2), (16, 4, 2, 3))
_DOWN = ((16, 8, 3, 1), (16, 8, 6, 1), (16, 8, 2, 2), (16, 16, 2, 1))
"""Configurations by direct.NAMES."""


def candidates(context: OpContext) -> Iterator[Config]:
    """Configurations worth timing."""
    for gate_up, down in product(_GATE_UP, _DOWN):
        yield {"gate_up": gate_up, "down": down}


def make_with(context: OpContext, config: Config) -> Coded:
    """The op in the configuration `config`."""
    return around(context, OneToken(context, {**DEFAULT, **config}))


def make(context: OpContext) -> Coded:
    """The op in the fastest measured configuration, or in the default one."""
    return make_with(context, tuned.choose(KERNEL, context, DEFAULT))
