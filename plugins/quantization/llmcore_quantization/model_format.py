"""`--model-format`: what the operator says that the weights of the checkpoint are. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from llmcore.api import Checkpoint, ModelConfig, ModeSpec, QuantMethodSpec, option

READ: Mapping[str, str] = {
    "awq": "AWQ of version gemm, 4 bits",
    "gptq": "GPTQ of 4 and 8 bits, v1 and v2, symmetric or not, with or without desc_act",
    "compressed-tensors": "llm-compressor's integers of 4 and 8 bits, float8, and mxfp4 as plain weights",
    "fp8": "float8 e4m3 with a scale per block (DeepSeek-V3, Qwen3-FP8) or per tensor (AutoFP8, ModelOpt)",
    "mxfp4": "GPT-OSS's experts, as plain weights",
}
"""Checkpoint format, which is a module of llmcore_quantization.formats and a name of `--model-format` -> what is
read."""

PLAIN = "hf"
"""LMDeploy's name of checkpoints that are not quantized."""


@dataclass(frozen=True, kw_only=True)
class ModelFormat:
    """The format of the checkpoint's weights."""

    model_format: str | None = option(
        None,
        f"The format that the weights must have; {PLAIN} is not quantized. With fp8, plain weights are quantized as "
        "they load (default: what the checkpoint says).",
        choices=(PLAIN, *READ),
        unset="None",
    )


def methods() -> Iterable[QuantMethodSpec]:
    """A reader for each format. The reader of fp8 also quantizes a plain checkpoint, and `hf` reads only that."""
    for name, summary in READ.items():
        module = name.replace("-", "_")
        yield QuantMethodSpec(
            name=name,
            make=f"llmcore_quantization.formats.{module}:make",
            reads=f"{__name__}:reads_{module}",
            plain=name == "fp8",
            summary=summary,
        )
    yield QuantMethodSpec(name=PLAIN, make=f"{__name__}:Plain", plain=True, summary="plain weights, as they are")


def modes() -> Iterable[ModeSpec]:
    """A mode for each value of the option. It pins the method, which reads no other checkpoints."""
    for name in (PLAIN, *READ):
        yield ModeSpec(
            name=f"model_format_{name}",
            quant=name,
            asked=({"model_format": (name,)},),
            summary=f"the checkpoint's weights are {'not quantized' if name == PLAIN else f'quantized as {name}'}",
        )


class Plain:
    """A protocols.QuantMethod that leaves plain weights as they are."""

    def __init__(self, options: Mapping[str, Any], config: ModelConfig) -> None:
        pass

    def checkpoint(self, checkpoint: Checkpoint, device: object) -> Checkpoint:
        """The checkpoint itself."""
        return checkpoint

    def method_for(self, modules: object) -> None:
        """None."""

    def expert_method(self, modules: object) -> None:
        """None."""


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
    """True for FP8 of Hugging Face and of AutoFP8, and for ModelOpt, of which FP8 is read."""
    return quantization.get("quant_method") in ("fp8", "modelopt")


def reads_mxfp4(quantization: Mapping[str, Any]) -> bool:
    """True for GPT-OSS's mxfp4."""
    return quantization.get("quant_method") == "mxfp4"
