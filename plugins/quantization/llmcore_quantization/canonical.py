"""The one form in which all quantized weights are held: outputs first, and for 4 bits the low nibble first.

Readers bring every checkpoint into it, and modes quantize plain weights into it. Ops and kernels know no other form.

A linear with K inputs and N outputs, whose groups of G inputs share a scale, has these tensors:

- `codes`: u8 [N, K / 2] for 4 bits, where input 2i is the low nibble of byte i; int8 or float8_e4m3fn [N, K] for 8.
- `scale`: [N, K / G] in `Scheme.scale`. Checkpoints with a scale per tensor or per block of rows repeat it.
- `zero`: only with `Scheme.zeros`; u8 [N, K / G] from 0 to 15 for 4 bits, int8 for 8.
- `order`: only with `Scheme.ordered`; int32 [K]. Input i of `codes` is input `order[i]` of the linear.
- `input_scale`: only for static activations; f32 [1].

The weight is (codes - zero) * scale. Without `zero` the zero is 8 for 4 bits, and 0 for 8.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from llmcore.layers import DTYPES

ScaleType = Literal["f32", "f16", "bf16"]


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """The way in which the weight of one linear is quantized, and its inputs when it is multiplied."""

    codes: Literal["u4", "i8", "e4m3"]
    group: int = 0
    """Inputs that share a scale; 0: all of a row."""
    scale: ScaleType = "f16"
    zeros: bool = False
    ordered: bool = False
    """The groups are of inputs in another order (GPTQ's desc_act)."""
    inputs: Literal["plain", "row", "static", "group"] = "plain"
    """The inputs that are multiplied: as they are, or quantized to the type of `codes`, with a scale per token, with
    the checkpoint's own scale, or with a scale per token and group."""


BLOCK = 128
"""Outputs that share a scale, if inputs are quantized by groups: weights are published with scales of such blocks."""

CODES: dict[str, torch.dtype] = {"u4": torch.uint8, "i8": torch.int8, "e4m3": torch.float8_e4m3fn}


def shapes(scheme: Scheme, inputs: int, outputs: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """(shape, dtype) of each tensor of a linear. Raises ValueError if the groups do not divide `inputs`."""
    group = scheme.group or inputs
    if inputs % group or (scheme.codes == "u4" and inputs % 2):
        raise ValueError(f"groups of {group} inputs do not divide {inputs}")
    scales = (outputs, inputs // group)
    found: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
        "codes": ((outputs, inputs // 2 if scheme.codes == "u4" else inputs), CODES[scheme.codes]),
        "scale": (scales, DTYPES[scheme.scale]),
    }
    if scheme.zeros:
        found["zero"] = (scales, torch.uint8 if scheme.codes == "u4" else torch.int8)
    if scheme.ordered:
        found["order"] = ((inputs,), torch.int32)
    if scheme.inputs == "static":
        found["input_scale"] = ((1,), torch.float32)
    return found


def unpacked(codes: torch.Tensor) -> torch.Tensor:
    """u8 [N, K / 2] of two nibbles each -> u8 [N, K]."""
    return torch.stack((codes & 15, codes >> 4), -1).flatten(-2)


def packed(nibbles: torch.Tensor) -> torch.Tensor:
    """u8 [N, K] from 0 to 15 -> u8 [N, K / 2]."""
    low, high = nibbles[..., 0::2], nibbles[..., 1::2]
    return torch.bitwise_or(low, high << 4)


def dequantized(
    codes: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor | None = None,
    order: torch.Tensor | None = None,
    *,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """The weight [N, K], its inputs in the linear's own order, computed in f32 and rounded once to `dtype`."""
    four = codes.dtype == torch.uint8
    # Each type holds codes and their distances from a zero exactly. torch multiplies by a scale in f32 with f32.
    groups = (unpacked(codes) if four else codes).to(dtype).reshape(*scale.shape, -1)
    if zero is not None:
        groups.sub_(zero[..., None])
    elif four:
        groups.sub_(8)
    weight = groups.mul_(scale.float()[..., None]).flatten(-2)
    return weight if order is None else weight[:, order.argsort().long()]
