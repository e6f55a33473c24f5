"""Quantized weights and KV: readers of checkpoints, methods that quantize at load, ops, and KV layouts."""

from collections.abc import Iterable, Mapping
from typing import Any

from llmcore.api import QuantMethodSpec, hookimpl


@hookimpl
def register_quant_methods() -> Iterable[QuantMethodSpec]:
    """A reader for each checkpoint format, which has the format's name in `quant_method`."""
    for name, summary in FORMATS.items():
        module = name.replace("-", "_")
        yield QuantMethodSpec(
            name=name,
            make=f"{__name__}.formats.{module}:make",
            reads=f"{__name__}:reads_{module}",
            summary=summary,
        )


FORMATS: Mapping[str, str] = {
    "awq": "AWQ of version gemm, 4 bits",
    "gptq": "GPTQ of 4 and 8 bits, v1 and v2, symmetric or not, with or without desc_act",
    "compressed-tensors": "llm-compressor's integers of 4 and 8 bits, float8, and mxfp4 as plain weights",
    "fp8": "float8 e4m3 with a scale per block (DeepSeek-V3, Qwen3-FP8) or per tensor (AutoFP8)",
    "mxfp4": "GPT-OSS's experts, as plain weights",
}


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
