"""`fp8-block`: reads FP8 weights with a scale per block (DeepSeek-V3, Qwen3-FP8) as plain weights."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from llmcore.api import QuantMethodSpec, hookimpl


@hookimpl
def register_quant_methods() -> Iterable[QuantMethodSpec]:
    """The method `fp8-block`."""
    yield QuantMethodSpec(
        name="fp8-block",
        make="llmcore.builtin.fp8_checkpoint:make",
        reads=f"{__name__}:reads",
        summary="quant_method fp8 with a weight_block_size, dequantized to the compute type as it is read",
    )


def reads(quantization: Mapping[str, Any]) -> bool:
    """True if FP8 weights have a scale per block. A scale per tensor or per row needs another method."""
    return quantization.get("quant_method") == "fp8" and quantization.get("weight_block_size") is not None
