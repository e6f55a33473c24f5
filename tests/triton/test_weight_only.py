"""Which kernel multiplies weights in 4 and 8 bits, and why others decline."""

from __future__ import annotations

from typing import Any

import pytest
from llmcore.api.specs import DeviceInfo, OpContext
from llmcore.config import Config
from llmcore.registry.loader import build_registry, select
from llmcore.registry.resolve import candidates_for, resolve
from llmcore_quantization.canonical import Scheme
from llmcore_quantization.ops import shape_of

GPU = DeviceInfo("cuda", "NVIDIA H200", capability=90, processors=132)
REGISTRY = build_registry(Config(discovered=select(None).plugins))
EXPECTED = ("small_rows", "small_rows", "small_rows", "many_rows", "scratch")


def chosen(scheme: Scheme, bucket: int, gated: bool = False, **more: Any) -> tuple[str, Any]:
    """The kernel, and why others decline, of sizes that nobody measures."""
    op = ("linear.w4a16" if scheme.codes == "u4" else "linear.w8a16") + ("_silu_and_mul" if gated else "")
    shape = shape_of(scheme, 4096 + 256, 768, False, "silu_and_mul" if gated else None)
    context = OpContext(op=op, device=GPU, dtype=more.pop("dtype", "bf16"), bucket=bucket, shape=shape, **more)
    found = resolve(candidates_for(REGISTRY, op), context, {})
    return found.chosen.name, found.reasons


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("codes", ["u4", "i8", "e4m3"])
def test_without_measurements_the_number_of_tokens_decides(codes: Any, gated: bool) -> None:
    scheme = Scheme(codes=codes, group=128 if codes == "u4" else 0, zeros=codes == "u4")
    assert tuple(chosen(scheme, bucket, gated)[0] for bucket in range(5)) == EXPECTED


def test_what_does_not_fit_goes_to_the_dequantized_weight() -> None:
    cases = (
        (Scheme(codes="u4", group=8), {}, "multiple of 16"),
        (Scheme(codes="u4", group=128, zeros=True, scale="f32"), {}, "no room for zeros"),
        (Scheme(codes="u4", group=128), {"dtype": "f32"}, "f32"),
        (Scheme(codes="u4", group=128), {"deterministic": True}, "may depend"),
    )
    for scheme, more, why in cases:
        name, reasons = chosen(scheme, 0, **more)
        assert name not in EXPECTED
        assert why in reasons["small_rows"]
