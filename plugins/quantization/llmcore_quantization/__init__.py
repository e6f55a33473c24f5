"""Quantized weights and KV: readers of checkpoints, methods that quantize at load, ops, and KV layouts."""

from collections.abc import Iterable

from llmcore.api import KVLayoutSpec, ModeSpec, OpSpec, OptionSpec, QuantMethodSpec, hookimpl, options_of

from llmcore_quantization import model_format
from llmcore_quantization.kv import names
from llmcore_quantization.kv.options import KVQuantization
from llmcore_quantization.model_format import ModelFormat


@hookimpl
def register_ops() -> Iterable[OpSpec]:
    """Linears over the canonical tensors of llmcore_quantization.canonical."""
    weight_only = "(x [T, inputs], codes, scale, zero | None, order | None, bias | None) -> [T, outputs]"
    signatures = {
        "w4a16": weight_only,
        "w8a16": weight_only,
        "w8a8": "(x [T, inputs], codes, scale, input_scale [1] | None, bias | None) -> [T, outputs]",
        "fp8_block": "(x [T, inputs], codes, scale, bias | None) -> [T, outputs]",
    }
    for name, signature in signatures.items():
        yield OpSpec(name=f"linear.{name}", module=f"{__name__}.ops.linear_{name}", signature=signature)


_ONLINE = {
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

_GROUPS = (32, 64, 128)


@hookimpl
def register_quant_methods() -> Iterable[QuantMethodSpec]:
    """A reader for each checkpoint format, and methods that quantize the linears of a plain checkpoint as it loads."""
    yield from model_format.methods()
    for name, (summary, _) in _ONLINE.items():
        yield QuantMethodSpec(name=f"online_{name}", make=f"{__name__}.online:{name}", plain=True, summary=summary)


@hookimpl
def register_modes() -> Iterable[ModeSpec]:
    """LightLLM's modes, two for float8 weights, the group of 4-bit weights, the formats of checkpoints, and KV."""
    for method, (summary, modes) in _ONLINE.items():
        for name in modes:
            yield ModeSpec(name=name, quant=f"online_{method}", summary=summary)
    for group in _GROUPS:
        yield ModeSpec(
            name=f"g{group}",
            quant_options={"group": group},
            summary=f"{group} inputs share a scale, beside a mode with 4-bit weights (default: 128)",
        )
    yield from model_format.modes()
    yield from names.modes()


@hookimpl
def register_kv_layouts() -> Iterable[KVLayoutSpec]:
    """Layouts that store KV in 8 and 4 bits."""
    yield from names.layouts()


@hookimpl
def register_options() -> Iterable[OptionSpec]:
    """The options of LightLLM and LMDeploy that quantize KV, and LMDeploy's assertion about the checkpoint."""
    yield from options_of(KVQuantization)
    yield from options_of(ModelFormat)
