"""The form in which the weight-only kernels keep weights: words of 16 bits, [outputs, words of a row].

The inputs of a row are cut into blocks. Word w of a block holds input w of each part of the block: four nibbles or two
bytes, whose inputs lie a quarter or half of the block apart, the first in the low bits. So a tile of words becomes
tiles of neighbouring inputs by shifts alone. Words of 16 bits are loaded and moved as bf16 is. The last
block may reach over the end of the inputs; kernels multiply its surplus codes with zeros.

Scales are [groups, outputs], since a tile needs those of many outputs and few groups. Each has 32 bits, the least that
a GPU copies to shared memory without waiting: an f32, or with zeros an int32 with the scale's 16 bits and, above them,
the bits of the zero in the form in which it is added to codes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from math import gcd
from typing import Any, NamedTuple

import torch
from llmcore.api import OpContext

from llmcore_triton.linear_shapes import is_gated, known_sizes

BITS: Mapping[str, int] = {"u4": 4, "i8": 8, "e4m3": 8}

_BLOCKS: Mapping[int, tuple[int, ...]] = {4: (256, 128, 64), 8: (128, 64, 32)}
"""Bits -> the inputs that a block may have. Larger ones need fewer instructions."""


class Blocks(NamedTuple):
    """`inputs` of a block; `parts` of it, of `words` inputs each; `total` blocks in a row."""

    inputs: int
    parts: int
    words: int
    total: int


def blocks_of(shape: Mapping[str, Any]) -> Blocks | None:
    """The blocks of a linear whose op has `shape`. None if the scale changes within each part of a block."""
    bits, inputs, group = BITS[shape["codes"]], int(shape["inputs"]), int(shape["group"])
    parts = 16 // bits
    fitting = [block for block in _BLOCKS[bits] if group % (block // parts) == 0]
    if not fitting:
        return None
    block = next((block for block in fitting if inputs % block == 0), fitting[-1])
    return Blocks(block, parts, block // parts, -(-inputs // block))


def packed(codes: torch.Tensor, blocks: Blocks) -> torch.Tensor:
    """Canonical codes -> words int16 [outputs, total * words]."""
    if codes.dtype == torch.uint8:
        codes = torch.stack((codes & 15, codes >> 4), -1).flatten(-2)
    codes = codes.view(torch.uint8)
    codes = torch.nn.functional.pad(codes, (0, blocks.total * blocks.inputs - codes.shape[-1]))
    codes = codes.view(*codes.shape[:-1], blocks.total, blocks.parts, blocks.words)
    words = codes[..., 0, :].to(torch.int16)
    for part in range(1, blocks.parts):
        words |= codes[..., part, :].to(torch.int16) << (part * 16 // blocks.parts)
    return words.flatten(-2)


def zero_bits(zero: torch.Tensor, dtype: str) -> torch.Tensor:
    """Zeros as int16: the bits of the number to which a code is added in the model's `dtype` (f16 serves f32 too).

    A code of 4 bits is added as 128 + code in bf16 and as 1024 + code in f16.
    """
    half = torch.bfloat16 if dtype == "bf16" else torch.float16
    base = 0 if zero.dtype == torch.int8 else 128 if dtype == "bf16" else 1024
    return (-(zero.to(torch.int32) + base)).to(half).view(torch.int16)


def marks(scale: torch.Tensor, zero: torch.Tensor | None, dtype: str) -> torch.Tensor:
    """Canonical scales and zeros [..., outputs, groups] -> [..., groups, outputs], f32, or int32 if zeros exist.

    Raises ValueError for zeros beside scales in f32, for which an int32 has no room.
    """
    if zero is None:
        return scale.mT.float().contiguous()
    if scale.dtype == torch.float32:
        raise ValueError("scales in f32 do not fit beside zeros")
    bits = scale.mT.contiguous().view(torch.int16).to(torch.int32) & 0xFFFF
    return bits | zero_bits(zero.mT.contiguous(), dtype).to(torch.int32) << 16


class Packing:
    """The packed form of the weights of one linear. `group`: inputs that share a scale; 0: all, without zeros.
    `alike`: parts of a block that share a scale.

    Raises ValueError for groups that no block fits.
    """

    def __init__(self, context: OpContext) -> None:
        shape = context.shape
        blocks = blocks_of(shape)
        if blocks is None:
            raise ValueError(f"no block of inputs has parts that divide a group of {shape['group']}")
        self.blocks, self._dtype = blocks, context.dtype
        zeros = bool(shape["zeros"])
        self.group = int(shape["group"] or zeros * blocks.total * blocks.inputs)
        self.alike = gcd(blocks.parts, (self.group or blocks.inputs) // blocks.words)
        self.name = f"{blocks.parts} x {blocks.words} words" + (f", zeros for {context.dtype}" if zeros else "")

    def pack(
        self, codes: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None, order: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """Canonical tensors in the packed form, in which the zeros are beside the scales."""
        return packed(codes, self.blocks), marks(scale, zero, self._dtype), None, order

    def arranged(
        self,
        x: torch.Tensor,
        codes: torch.Tensor,
        scale: torch.Tensor,
        zero: torch.Tensor | None,
        order: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Canonical or packed tensors -> x [T, inputs] in the order of the codes, words, and marks."""
        if codes.dtype != torch.int16:
            codes, scale, zero, order = self.pack(codes, scale, zero, order)
        return x if order is None else x.index_select(1, order), codes, scale


class Packed(ABC):
    """A kernel for packed weights, bound to a context. It takes canonical tensors too.

    Raises ValueError for a context without sizes, and for groups that no block fits.
    """

    def __init__(self, context: OpContext) -> None:
        sizes = known_sizes(context)
        if sizes is None:
            raise ValueError(f"{context.op} needs a shape with inputs and outputs or size, has {dict(context.shape)}")
        self._context, self._sizes, self._gated = context, sizes, is_gated(context)
        self._form = Packing(context)
        self.packing, self.pack = self._form.name, self._form.pack

    def __call__(
        self,
        x: torch.Tensor,
        codes: torch.Tensor,
        scale: torch.Tensor,
        zero: torch.Tensor | None = None,
        order: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """x [T, inputs], a weight in the canonical or the packed form -> [T, outputs], or half of that if gated."""
        return self.multiply(*self._form.arranged(x, codes, scale, zero, order), bias)

    @abstractmethod
    def multiply(
        self, x: torch.Tensor, words: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """x [T, inputs] in the order of the codes, packed words and marks -> as the call."""
