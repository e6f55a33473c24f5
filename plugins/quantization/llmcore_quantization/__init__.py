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
    """Linears and mixtures of experts over the canonical tensors of llmcore_quantization.canonical, and the ops that
    write the inputs of linears.

    Without a kernel of its own each dequantizes the weight and multiplies it as `linear` or `moe.experts`.
    """
    weights = "codes, scale, zero | None, order | None, bias | None"
    for name in ("linear.w4a16", "linear.w8a16"):
        yield _op(name, f"(x [T, inputs], {weights}) -> [T, outputs]", "linear")
        yield _op(f"{name}_silu_and_mul", f"(x [T, inputs], {weights}) -> [T, size]", name, "silu_and_mul")
    for name in ("linear.w8a8", "linear.fp8_block"):
        yield _op(name, "(x codes [T, inputs], x_scale, codes, scale, bias | None) -> [T, outputs]", "linear")
    quantized = "(codes [T, size], scale [T, size / group]"
    yield _op("quantize_rows", f"(x [T, size], input_scale [1] | None) -> {quantized})")
    for name, arguments, results in (
        ("rms_norm", "x [T, size], weight, eps", ""),
        ("add_rms_norm", "x [T, size], residual, weight, eps", ", sum"),
        ("silu_and_mul", "x [T, 2 size]", ""),
    ):
        yield _op(f"{name}_quant", f"({arguments}) -> {quantized}{results})", name, "quantize_rows")
    for bits in ("w4a16", "w8a16"):
        stacks = "gate_up (codes, scale, zero | None), down (codes, scale, zero | None)"
        yield _op(f"moe.experts.{bits}", f"(Dispatched, {stacks}, into | None) -> [T top_k, size]", "moe.experts")
        parts = ("moe.route", "moe.dispatch", f"moe.experts.{bits}", "moe.combine", "linear_silu_and_mul", "linear")
        arguments = f"x [T, size], router, bias | None, {stacks}, extra | None, shared | None"
        yield _op(f"moe.fused.{bits}", f"({arguments}) -> [T, size]", *parts)


def _op(name: str, signature: str, *parts: str) -> OpSpec:
    module = f"{__name__}.ops.{name.replace('.', '_')}"
    return OpSpec(name=name, module=module, signature=signature, expands_to=parts, row_wise=not parts)


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
