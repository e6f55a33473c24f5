"""Quantized weights and KV: readers of checkpoints, methods that quantize at load, ops, and KV layouts."""

from collections.abc import Iterable

from llmcore.api import OpSpec, hookimpl


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
