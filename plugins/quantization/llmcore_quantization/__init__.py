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

from llmcore_quantization.kv import names
from llmcore_quantization.kv.options import KVQuantization


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


FORMATS: Mapping[str, str] = {
    "awq": "AWQ of version gemm, 4 bits",
    "gptq": "GPTQ of 4 and 8 bits, v1 and v2, symmetric or not, with or without desc_act",
    "compressed-tensors": "llm-compressor's integers of 4 and 8 bits, float8, and mxfp4 as plain weights",
    "fp8": "float8 e4m3 with a scale per block (DeepSeek-V3, Qwen3-FP8) or per tensor (AutoFP8)",
    "mxfp4": "GPT-OSS's experts, as plain weights",
}
"""Checkpoint format, which is a module of llmcore_quantization.formats -> what is read."""

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
    for name, summary in FORMATS.items():
        module = name.replace("-", "_")
        yield QuantMethodSpec(
            name=name,
            make=f"{__name__}.formats.{module}:make",
            reads=f"{__name__}:reads_{module}",
            summary=summary,
        )
    for name, (summary, _) in _ONLINE.items():
        yield QuantMethodSpec(name=f"online_{name}", make=f"{__name__}.online:{name}", plain=True, summary=summary)


@hookimpl
def register_modes() -> Iterable[ModeSpec]:
    """LightLLM's modes, two for float8 weights, the group of 4-bit weights, and LMDeploy's policies for KV."""
    for method, (summary, modes) in _ONLINE.items():
        for name in modes:
            yield ModeSpec(name=name, quant=f"online_{method}", summary=summary)
    for group in _GROUPS:
        yield ModeSpec(
            name=f"g{group}",
            quant_options={"group": group},
            summary=f"{group} inputs share a scale, beside a mode with 4-bit weights (default: 128)",
        )
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
