"""Rounding to the grid of a Scheme: of plain weights to canonical tensors, and of a linear's inputs."""

from __future__ import annotations

import torch
from llmcore.layers import DTYPES

from llmcore_quantization.canonical import CODES, Scheme, packed

RANGES = {"u4": (0, 15), "i8": (-128, 127), "e4m3": (-448, 448)}
"""The least and the largest code. torch makes NaN of what is beyond that of e4m3."""

LIMITS = {"u4": 7.5, "i8": 127.0, "e4m3": 448.0}
"""The symmetric code of a group's largest magnitude. 7.5 rounds to 7 or -8, so both ends of the range are used."""

CHUNK = 1 << 20
"""Number of weights quantized at a time, so that their f32 form stays small."""


def quantized(weight: torch.Tensor, scheme: Scheme, rows: int = 1) -> dict[str, torch.Tensor]:
    """The tensors `codes`, `scale` and, if the scheme has it, `zero` of a plain weight [N, K].

    A scale is first rounded to its own type, and codes are then the nearest on the grid that it makes. With zeros the
    grid reaches from the group's least value or 0 to its largest value or 0; without them it is symmetric around 0.
    `rows`: neighbouring outputs that share their scales, as in blocks of 128 x 128.
    """
    chunk = rows * max(1, CHUNK // (rows * weight.shape[1]))
    parts = [_quantized(part, scheme, rows) for part in torch.split(weight, chunk)]
    return {leaf: torch.cat([part[leaf] for part in parts]) for leaf in parts[0]}


def _quantized(weight: torch.Tensor, scheme: Scheme, rows: int) -> dict[str, torch.Tensor]:
    outputs, inputs = weight.shape
    groups = weight.to(torch.float32, copy=True).view(outputs, -1, scheme.group or inputs)
    low, high = groups.aminmax(dim=-1)
    found: dict[str, torch.Tensor] = {}
    if scheme.zeros:
        low, high = low.clamp(max=0.0), high.clamp(min=0.0)
        least, most = RANGES[scheme.codes]
        scale = _steps((high - low) / (most - least), scheme)
        zero = (least - low / scale.float()).round().clamp(least, most)[..., None]
        found["zero"] = zero.squeeze(-1).to(CODES[scheme.codes])
    else:
        largest = torch.maximum(-low, high)
        for block in torch.split(largest, rows) if rows > 1 else ():
            block.copy_(block.amax(0).expand_as(block))
        scale = _steps(largest / LIMITS[scheme.codes], scheme)
        zero = torch.tensor(8.0 if scheme.codes == "u4" else 0.0, device=weight.device)
    groups.div_(scale.float()[..., None])
    if scheme.codes != "e4m3":
        groups.round_().add_(zero)
    codes = groups.clamp_(*RANGES[scheme.codes]).to(CODES[scheme.codes]).flatten(-2)
    return {"codes": packed(codes) if scheme.codes == "u4" else codes, "scale": scale, **found}


def codes_of(
    x: torch.Tensor, kind: torch.dtype, group: int = 0, scale: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs [T, K] -> (codes [T, K] of type `kind`, int8 or float8_e4m3fn; scales [T, K / group] f32).

    The largest magnitude of a token, or of each of its groups of `group` inputs, becomes 127 or 448. The scale of
    zeros is 1. `scale` [1] f32 is a fixed scale instead; values beyond its range become the last code.
    """
    name = next(name for name, dtype in CODES.items() if dtype == kind)
    size = group or x.shape[-1]
    groups = x.float().view(len(x), x.shape[-1] // size, size)
    steps = _nonzero(groups.abs().amax(-1) / LIMITS[name]) if scale is None else scale.expand(groups.shape[:2])
    values = groups / steps[..., None]
    if name != "e4m3":
        values.round_()
    return values.clamp_(*RANGES[name]).to(kind).flatten(-2), steps.contiguous()


def restored(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Codes [T, K] times their scales [T, K / group], in f32."""
    groups = codes.float().view(*scale.shape, codes.shape[1] // scale.shape[1])
    return groups.mul_(scale[..., None]).flatten(-2)


def _steps(scale: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    """`scale` in the scheme's type."""
    return _nonzero(scale.to(DTYPES[scheme.scale]))


def _nonzero(scale: torch.Tensor) -> torch.Tensor:
    """1 instead of 0, the scale of values that are all 0."""
    return torch.where(scale == 0, torch.ones_like(scale), scale)
