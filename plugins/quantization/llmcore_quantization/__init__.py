"""Quantized weights and KV: readers of checkpoints, methods that quantize at load, ops, and KV layouts."""

from collections.abc import Iterable

from llmcore.api import (
    CommandSpec,
    KVLayoutSpec,
    ModeSpec,
    OpSpec,
    OptionSpec,
    QuantMethodSpec,
    hookimpl,
    options_of,
)

from llmcore_quantization import model_format, modes
from llmcore_quantization.kv import names
from llmcore_quantization.kv.options import KVQuantization
from llmcore_quantization.model_format import ModelFormat


@hookimpl
def register_ops() -> Iterable[OpSpec]:
    """Linears over the canonical tensors of llmcore_quantization.canonical.

    Without a kernel of its own each dequantizes the weight and multiplies it as `linear`.
    """
    weight_only = "(x [T, inputs], codes, scale, zero | None, order | None, bias | None) -> [T, outputs]"
    signatures = {
        "w4a16": weight_only,
        "w8a16": weight_only,
        "w8a8": "(x [T, inputs], codes, scale, input_scale [1] | None, bias | None) -> [T, outputs]",
        "fp8_block": "(x [T, inputs], codes, scale, bias | None) -> [T, outputs]",
    }
    for name, signature in signatures.items():
        module = f"{__name__}.ops.linear_{name}"
        yield OpSpec(name=f"linear.{name}", module=module, signature=signature, expands_to=("linear",))


@hookimpl
def register_quant_methods() -> Iterable[QuantMethodSpec]:
    """A reader for each checkpoint format, and methods that quantize the linears of a plain checkpoint as it loads."""
    yield from model_format.methods()
    yield from modes.methods()


@hookimpl
def register_modes() -> Iterable[ModeSpec]:
    """LightLLM's modes, two for float8 weights, the group of 4-bit weights, the formats of checkpoints, and KV."""
    yield from modes.modes()
    yield from model_format.modes()
    yield from names.modes()


@hookimpl
def register_kv_layouts() -> Iterable[KVLayoutSpec]:
    """Layouts that store KV in 8 and 4 bits."""
    yield from names.layouts()


@hookimpl
def register_commands() -> Iterable[CommandSpec]:
    """`llmcore calibrate`."""
    yield CommandSpec(
        name="calibrate",
        summary="Measure the scales of fp8 KV on a text.",
        command=f"{__name__}.kv.command:command",
        heading="Run",
    )


@hookimpl
def register_options() -> Iterable[OptionSpec]:
    """The options of LightLLM and LMDeploy that quantize KV, and LMDeploy's assertion about the weights."""
    yield from options_of(KVQuantization)
    yield from options_of(ModelFormat)
