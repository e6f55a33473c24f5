"""Quantized weights and KV: readers of checkpoints, methods that quantize at load, ops, and KV layouts."""

from collections.abc import Iterable, Mapping
from typing import Any

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

from llmcore_quantization import modes
from llmcore_quantization.kv import names
from llmcore_quantization.kv.options import KVQuantization


@hookimpl
def register_ops() -> Iterable[OpSpec]:
    """Linears over the canonical tensors of llmcore_quantization.canonical. Without a kernel of its own, each dequantizes
    the weight and multiplies it as `linear`."""
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


FORMATS: Mapping[str, str] = {
    "awq": "AWQ of version gemm, 4 bits",
    "gptq": "GPTQ of 4 and 8 bits, v1 and v2, symmetric or not, with or without desc_act",
    "compressed-tensors": "llm-compressor's integers of 4 and 8 bits, float8, and mxfp4 as plain weights",
    "fp8": "float8 e4m3 with a scale per block (DeepSeek-V3, Qwen3-FP8) or per tensor (AutoFP8)",
    "mxfp4": "GPT-OSS's experts, as plain weights",
}
"""Checkpoint format, which is a module of llmcore_quantization.formats -> what is read."""


@hookimpl
def register_quant_methods() -> Iterable[QuantMethodSpec]:
    """A reader for each checkpoint format, and methods that quantize the linears of a plain checkpoint as it loads."""
    for name, summary in FORMATS.items():
        module = name.replace("-", "_")
        yield QuantMethodSpec(
            name=name,
            make=f"{__name__}.formats.{module}:make",
            reads=f"{__name__}:reads_{module}",
            summary=summary,
        )
    yield from modes.methods()


@hookimpl
def register_modes() -> Iterable[ModeSpec]:
    """LightLLM's modes, two for float8 weights, the group of 4-bit weights, and LMDeploy's policies for KV."""
    yield from modes.modes()
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
    """The options of LightLLM and LMDeploy that quantize KV."""
    yield from options_of(KVQuantization)


def reads_awq(quantization: Mapping[str, Any]) -> bool:
    """True for AWQ."""
    return quantization.get("quant_method") == "awq"


def reads_gptq(quantization: Mapping[str, Any]) -> bool:
    """True for GPTQ."""
    return quantization.get("quant_method") == "gptq"


def reads_compressed_tensors(quantization: Mapping[str, Any]) -> bool:
    """True for compressed-tensors."""
    return quantization.get("quant_method") == "compressed-tensors"


def reads_fp8(quantization: Mapping[str, Any]) -> bool:
    """True for FP8 of Hugging Face, of AutoFP8 and of ModelOpt."""
    inner = quantization.get("quantization") or quantization
    modelopt = quantization.get("quant_method") == "modelopt" and inner.get("quant_algo") == "FP8"
    return quantization.get("quant_method") == "fp8" or modelopt


def reads_mxfp4(quantization: Mapping[str, Any]) -> bool:
    """True for GPT-OSS's mxfp4."""
    return quantization.get("quant_method") == "mxfp4"
