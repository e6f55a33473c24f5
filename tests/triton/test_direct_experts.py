"""moe.fused.w4a16=direct: when it is chosen, and what a Hopper's compiler makes of it.

Gluon does not run in Triton's interpreter, so results are checked on GPUs: `llmcore kernels moe.fused.w4a16 --check`.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from compiled_for_hopper import compiling, instructions
from llmcore.api.specs import DeviceInfo, OpContext
from llmcore.config import Config
from llmcore.registry.loader import build_registry, select
from llmcore.registry.resolve import candidates_for, resolve
from llmcore_triton.quantized import direct_experts
from llmcore_triton.quantized.experts import Packed

H200 = DeviceInfo("cuda", "NVIDIA H200", capability=90, processors=132)
REGISTRY = build_registry(Config(discovered=select(None).plugins))
QWEN = {"experts": 4, "top_k": 8, "scoring": "softmax", "normalize": True, "size": 2048, "inner": 768}
FOUR = {"codes": "u4", "group": 128, "zeros": True, "scale_type": "f16"}


def context(form: dict[str, Any] = FOUR, bucket: int = 0, **sizes: int) -> OpContext:
    shape = {**QWEN, **form, **sizes}
    return OpContext(op="moe.fused.w4a16", bucket=bucket, shape=shape, device=H200, dtype="bf16")


def chosen(asked: OpContext) -> tuple[str, str]:
    """The kernel, and why direct declines."""
    found = resolve(candidates_for(REGISTRY, asked.op), asked, {})
    return found.chosen.name, found.reasons.get("direct", "")


def test_the_least_time_wins(measured: Any) -> None:
    asked = context()
    measured(asked, triton=19.0, direct=17.0)
    assert chosen(asked)[0] == "direct"
    measured(asked, triton=16.0, direct=17.0)
    assert chosen(asked)[0] == "triton"


def test_why_it_declines(measured: Any) -> None:
    cases = (
        (context(), "nobody has measured"),
        (context(bucket=1), "is for steps of"),
        (context(inner=1408), "has 128 and 1408"),
        (context({**FOUR, "group": 32}), "has 32 and 2048"),
        (context({**FOUR, "scale_type": "f32"}), "no room for zeros"),
    )
    for asked, why in cases:
        name, reason = chosen(asked)
        assert name != "direct" and why in reason


def test_configurations() -> None:
    where = context()
    configs = list(direct_experts.candidates(where))
    assert direct_experts.DEFAULT in configs and len({json.dumps(config) for config in configs}) == len(configs)
    for config in configs:
        direct_experts.OneToken(where, config)
    with pytest.raises(ValueError, match="whole blocks of 64 words"):
        direct_experts.OneToken(context(inner=1408), direct_experts.DEFAULT)


def test_what_the_compiler_makes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loads of 16 bytes, products, and nothing between; no register is spilled."""
    compiled = compiling(tmp_path, monkeypatch)
    where, weights = context(), []
    for rows, inputs in ((1536, 2048), (2048, 768)):
        scale = torch.ones(4, rows, inputs // 128, dtype=torch.float16)
        codes = torch.zeros(4, rows, inputs // 2, dtype=torch.uint8)
        weights.append(Packed(where).words((codes, scale, torch.zeros_like(scale, dtype=torch.uint8))))
    kernel = direct_experts.OneToken(where, direct_experts.DEFAULT)
    x, chosen = torch.zeros(1, 2048, dtype=torch.bfloat16), torch.zeros(1, 8, dtype=torch.int32)
    out = kernel(x, torch.ones(1, 8), chosen, *weights, None, None)
    assert out.shape == (1, 2048) and out.dtype == torch.bfloat16
    assert len(compiled) == 2
    for one in compiled:
        sass = instructions(one, tmp_path)
        products = sass.index("HMMA")
        assert len(re.findall(r"LDG\.E\.EF\.128", sass[:products])) >= 8
        assert not re.findall(r"\b(?:LDL|STL|SHFL)\b", sass)
        assert "STS" not in sass[:products]
