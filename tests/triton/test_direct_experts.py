"""moe.fused.w4a16=direct and its relative: when it is chosen, and what a Hopper's compiler makes of it.

Gluon does not run in Triton's interpreter, so results are checked on GPUs: `llmcore kernels moe.fused.w4a16 --check`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from compiled_for_hopper import compiling, instructions
from llmcore.api.specs import DeviceInfo, OpContext
from llmcore.config import Config
from llmcore.registry.loader import build_registry, select
from llmcore.registry.resolve import candidates_for, resolve
from llmcore_triton import tuned
from llmcore_triton.quantized import direct_experts
from llmcore_triton.quantized.experts import Packed

H200 = DeviceInfo("cuda", "NVIDIA H200", capability=90, processors=132)
REGISTRY = build_registry(Config(discovered=select(None).plugins))
QWEN = {"experts": 4, "top_k": 8, "scoring": "softmax", "normalize": True, "size": 2048, "inner": 768}
FOUR = {"codes": "u4", "group": 128, "zeros": True, "scale_type": "f16"}
EIGHT = {"codes": "e4m3", "group": 0, "zeros": False, "scale_type": "f32"}


def context(form: dict[str, Any], bucket: int = 0, dtype: Any = "bf16", **sizes: int) -> OpContext:
    op = "moe.fused.w4a16" if form["codes"] == "u4" else "moe.fused.w8a16"
    return OpContext(op=op, bucket=bucket, shape={**QWEN, **form, **sizes}, device=H200, dtype=dtype)


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Writes that some kernels were measured in a context: (context, kernel=microseconds, ...)."""

    def write(asked: OpContext, **times: float) -> None:
        shape = {name: value for name, value in asked.shape.items() if value not in (None, False)}
        entries = [
            {"op": asked.op, "dtype": "bf16", "bucket": asked.bucket, "shape": shape, "config": {}}
            | {"kernel": kernel, "us": us}
            for kernel, us in times.items()
        ]
        text = json.dumps({"gpu": H200.name, "capability": 90, "entries": entries})
        (tmp_path / "h200.json").write_text(text, encoding="utf-8")
        tuned._table.cache_clear()

    monkeypatch.setattr(tuned, "_FOLDER", tmp_path)
    tuned._table.cache_clear()
    yield write
    tuned._table.cache_clear()


def chosen(asked: OpContext) -> tuple[str, str]:
    """The kernel, and why direct declines."""
    found = resolve(candidates_for(REGISTRY, asked.op), asked, {})
    return found.chosen.name, found.reasons.get("direct", "")


@pytest.mark.parametrize("form", [FOUR, EIGHT])
def test_the_least_time_wins(form: dict[str, Any], measured: Any) -> None:
    asked = context(form)
    measured(asked, triton=19.0, direct=14.0)
    assert chosen(asked)[0] == "direct"
    measured(asked, triton=13.0, direct=14.0)
    assert chosen(asked)[0] == "triton"


def test_why_it_declines(measured: Any) -> None:
    cases = (
        (context(FOUR), "nobody has measured"),
        (context(FOUR, bucket=1), "is for steps of"),
        (context(FOUR, inner=1408), "has 128 and 1408"),
        (context({**FOUR, "group": 32}), "has 32 and 2048"),
        (context({**FOUR, "scale_type": "f32"}), "no room for zeros"),
        (context(EIGHT, size=2048 + 64), "has 0 and 2112"),
    )
    for asked, why in cases:
        name, reason = chosen(asked)
        assert name != "direct" and why in reason


def test_configurations() -> None:
    for where in (context(FOUR), context(EIGHT)):
        configs = list(direct_experts.candidates(where))
        assert direct_experts.DEFAULT in configs and len({json.dumps(config) for config in configs}) == len(configs)
        for config in configs:
            direct_experts.OneToken(where, config)
    with pytest.raises(ValueError, match="whole blocks of 64 words"):
        direct_experts.OneToken(context(FOUR, inner=1408), direct_experts.DEFAULT)


@pytest.mark.parametrize("form", [FOUR, pytest.param(EIGHT, marks=pytest.mark.compiled)])
def test_what_the_compiler_makes(form: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loads of 16 bytes, products, and nothing between; no register is spilled."""
    compiled = compiling(tmp_path, monkeypatch)
    where, weights = context(form), []
    codes, kind = (2, torch.uint8) if form["codes"] == "u4" else (1, torch.float8_e4m3fn)
    for rows, inputs in ((1536, 2048), (2048, 768)):
        groups = inputs // (form["group"] or inputs)
        scale = torch.ones(4, rows, groups, dtype=torch.float16 if form["zeros"] else torch.float32)
        zero = torch.zeros(4, rows, groups, dtype=torch.uint8) if form["zeros"] else None
        held = torch.zeros(4, rows, inputs // codes, dtype=torch.uint8).view(kind)
        weights.append(Packed(where).words((held, scale, zero)))
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
