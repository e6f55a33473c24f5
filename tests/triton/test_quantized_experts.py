"""Mixtures of experts over words for few tokens: what a Hopper's compiler makes of them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from compiled_for_hopper import compiling, instructions
from llmcore.api.specs import DeviceInfo, OpContext
from llmcore_triton.linear_shapes import registers_of, shared_bytes
from llmcore_triton.moe.fused import FewTokens
from llmcore_triton.quantized import fused
from llmcore_triton.quantized.experts import Packed

QWEN = {"experts": 128, "top_k": 8, "scoring": "softmax", "normalize": True, "size": 2048, "inner": 768}
EIGHT = {"codes": "e4m3", "group": 0, "zeros": False, "scale_type": "f32"}
H200 = DeviceInfo("cuda", "NVIDIA H200", capability=90, processors=132)
EXPERTS = 52
"""Those that eight tokens choose on average, of 128 that are equally popular."""


def test_every_tile_of_eight_tokens_has_a_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A candidate limits registers so that all programs run at once, and none of them spills one."""
    where = OpContext(
        op="moe.fused.w8a16",
        bucket=1,
        shape={**QWEN, **EIGHT},
        device=H200,
        dtype="bf16",
    )
    tiles = {"gate_up": [16, 128, 128, 4, 3, 5], "down": [16, 128, 128, 4, 2, 7], "tma": True}
    assert tiles in list(fused.candidates(where))
    compiled, weights = compiling(tmp_path, monkeypatch), []
    for rows, inputs in ((1536, 2048), (2048, 768)):
        codes = torch.zeros(2, rows, inputs, dtype=torch.float8_e4m3fn)
        weights.append(Packed(where).words((codes, torch.ones(2, rows, 1), None)))
    x, chosen = torch.zeros(8, 2048, dtype=torch.bfloat16), torch.zeros(8, 8, dtype=torch.int32)
    FewTokens(where, tiles)(x, torch.ones(8, 8), chosen, *weights, None, None)
    # a tile has half as many outputs of gate and up as rows, and the last kernel is combine
    for one, places, tiles_of_expert in zip(compiled[:2], (5, 7), (768 // 64, 2048 // 128), strict=True):
        assert EXPERTS * tiles_of_expert <= places * H200.processors
        assert one.metadata.shared <= shared_bytes(where, places)
        sass = instructions(one, tmp_path)
        assert max(map(int, re.findall(r"\bR(\d+)\b", sass))) < registers_of(4 * 32 * places)
        assert not re.search(r"\b(?:LDL|STL)\b", sass)
