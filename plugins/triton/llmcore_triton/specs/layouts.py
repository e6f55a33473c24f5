"""The KV layouts that the kernels read and write, by name: how each stores the numbers of a head.

The layouts that quantize are those of `plugin-quantization`, whose layouts.py says what a pool holds. A test holds
both tables together.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

from llmcore.api import OpContext

TOKEN, LATENT = "token", "mla-latent"
"""The layouts that store numbers in the model's type."""


class Form(NamedTuple):
    """The form in which the keys or the values of a head are stored.

    `codes`: the type of an element. Unsigned codes count from the least value of their group, which is stored beside
    the scale. `group`: elements that share a scale, 0: the whole head. `fixed`: scales are constants of a head.
    """

    codes: Literal["i8", "u8", "u4", "e4m3"]
    group: int = 0
    fixed: bool = False


QUANTIZED: Mapping[str, tuple[Form, Form]] = {
    "token-int8": (Form("i8"), Form("i8")),
    "token-int8-g8": (Form("i8", group=8), Form("i8", group=8)),
    "token-int8-min": (Form("u8"), Form("u8")),
    "token-int4": (Form("u4", group=32), Form("u4", group=32)),
    **{f"token-int4-g{group}": (Form("u4", group=group), Form("u4", group=group)) for group in (8, 16, 64, 128)},
    "token-int8-int4": (Form("i8"), Form("u4", group=32)),
    "token-fp8": (Form("e4m3", fixed=True), Form("e4m3", fixed=True)),
    "token-fp8-dynamic": (Form("e4m3"), Form("e4m3")),
}
"""Layout of heads -> how it stores keys and values."""

QUANTIZED_LATENT: Mapping[str, Form] = {"mla-latent-fp8": Form("e4m3", group=128)}
"""Layout of latent rows -> how it stores the latent. The rotated part stays in the model's type."""

FP8 = 89
"""The least compute capability that converts fp8."""


def no_fp8(context: OpContext) -> str | None:
    """Returns why the device cannot store numbers as the layout of `context` does, or None."""
    name = context.layout or TOKEN
    forms = (*QUANTIZED.get(name, ()), *([QUANTIZED_LATENT[name]] if name in QUANTIZED_LATENT else []))
    if (context.device.capability or 0) >= FP8 or all(form.codes != "e4m3" for form in forms):
        return None
    return f"stores fp8 on GPUs of compute capability {FP8} or more"
