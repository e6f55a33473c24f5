"""gelu_and_mul: one program for each token and block of columns (see silu_and_mul). It rounds once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import triton
import triton.language as tl
from llmcore.api import OpContext
from llmcore.layers import Op

from llmcore_triton.gelu_tanh import gelu
from llmcore_triton.launch import release, wait
from llmcore_triton.rows import choose
from llmcore_triton.silu_and_mul import candidates, default, over_columns

__all__ = ["candidates", "default", "make", "make_with"]


@triton.jit
def _gated(x, out, stride, SIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    keep = columns < SIZE
    start = x + row * stride + columns
    wait(PDL)
    release(PDL)
    gate = tl.load(start, mask=keep).to(tl.float32)
    up = tl.load(start + SIZE, mask=keep).to(tl.float32)
    tl.store(out + row * SIZE + columns, (gelu(gate) * up).to(out.dtype.element_ty), mask=keep)


def make_with(context: OpContext, config: Mapping[str, Any]) -> Op:
    """The kernel in the configuration `config`."""
    return over_columns(_gated, context, config)


def make(context: OpContext) -> Op:
    """The kernel in the measured configuration, or in the default one."""
    return make_with(context, choose(context, default(context)))
