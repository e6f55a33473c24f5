"""The methods that quantize a plain checkpoint while it loads, by name, and the modes that pin them. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from llmcore.api import ModeSpec, QuantMethodSpec

GROUPS = (256, 128, 64, 32)
"""The groups that a mode with 4-bit weights takes: this number of inputs share a scale."""

GROUP = 128
"""The group without a mode that chooses another, as in LightLLM."""

METHODS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "w4a16": (
        "4-bit weights with a scale and a zero per group",
        ("triton_w4a16", "triton_int4weight", "lmdeploy_w4a16", "lmdeploy_int4weight"),
    ),
    "w4a16_symmetric": ("4-bit weights with a scale per group", ("ppl_w4a16", "ppl_int4weight")),
    "w8a16": ("int8 weights with a scale per row", ("triton_w8a16", "triton_int8weight")),
    "w8a8": ("int8 weights with a scale per row, int8 inputs with a scale per token", ("triton_w8a8",)),
    "w8a8_plain_o": ("as w8a8, with a plain o_proj", ("ppl_w8a8",)),
    "w8a8_mixdown": (
        "as w8a8, with a plain o_proj, and a plain down_proj in the layers of config.json's mixdown (default: all)",
        ("ppl_w8a8_mixdown",),
    ),
    "fp8w8a8": ("float8 weights with a scale per row, float8 inputs with a scale per token", ("fp8w8a8",)),
    "fp8w8a8_b128": (
        "float8 weights with a scale per 128 x 128, float8 inputs with a scale per token and 128 inputs",
        ("fp8w8a8_b128",),
    ),
}
"""Name in llmcore_quantization.online -> what the method makes of a plain checkpoint, and the modes that pin it."""

GROUPED = frozenset({"w4a16", "w4a16_symmetric"})
"""The methods whose group modes choose."""


def methods() -> Iterable[QuantMethodSpec]:
    """The methods. Each is a function of llmcore_quantization.online."""
    for name, (summary, _) in METHODS.items():
        make = f"llmcore_quantization.online:{name}"
        options = frozenset({"group"} if name in GROUPED else ())
        yield QuantMethodSpec(name=f"online_{name}", make=make, plain=True, options=options, summary=summary)


def modes() -> Iterable[ModeSpec]:
    """LightLLM's modes for weights, two for float8 weights, and the group of 4-bit weights."""
    for method, (summary, names) in METHODS.items():
        for name in names:
            yield ModeSpec(name=name, quant=f"online_{method}", summary=summary)
    for group in GROUPS:
        yield ModeSpec(
            name=f"g{group}",
            quant_options={"group": group},
            summary=f"{group} inputs share a scale, beside a mode with 4-bit weights (default: {GROUP})",
        )
