"""gelu_tanh: one program for each token and block of columns. It rounds once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import triton
import triton.language as tl
from llmcore.api import OpContext
from llmcore.layers import Op

from llmcore_triton.launch import release, wait
from llmcore_triton.rows import choose
from llmcore_triton.silu_and_mul import candidates, default, over_columns

__all__ = ["candidates", "default", "make", "make_with"]


@triton.jit
def gelu(x):  # type: ignore[no-untyped-def]
    """gelu of f32. (1 + tanh(u)) / 2 is sigmoid(2 u), which neither overflows nor cancels for u far below zero."""
    TWICE: tl.constexpr = 1.5957691216057308  # 2 sqrt(2 / pi)
    return x / (1.0 + tl.exp(-TWICE * x * (1.0 + 0.044715 * x * x)))


@triton.jit
def _bent(x, out, stride, SIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    keep = columns < SIZE
    wait(PDL)
    release(PDL)
    value = tl.load(x + row * stride + columns, mask=keep).to(tl.float32)
    tl.store(out + row * SIZE + columns, gelu(value).to(out.dtype.element_ty), mask=keep)


def make_with(context: OpContext, config: Mapping[str, Any]) -> Op:
    """The kernel in the configuration `config`."""
    return over_columns(_bent, context, config)


def make(context: OpContext) -> Op:
    """The kernel in the measured configuration, or in the default one."""
    return make_with(context, choose(context, default(context)))
