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
PLACES = {"gate_up": 5, "down": 7}


def test_every_tile_of_eight_tokens_has_a_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many programs as a candidate names share a multiprocessor, and none spills registers in its loop."""
    where = OpContext(
        op="moe.fused.w8a16",
        bucket=1,
        shape={**QWEN, **EIGHT},
        device=DeviceInfo("cuda", "NVIDIA H200", capability=90, processors=132),
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
    # the last one is combine
    for one, places in zip(compiled[:2], PLACES.values(), strict=True):
        assert one.metadata.shared <= shared_bytes(where, places)
        sass = instructions(one, tmp_path)
        assert max(map(int, re.findall(r"\bR(\d+)\b", sass))) < registers_of(4 * 32 * places)
        loop = sass[sass.index("HGMMA") : sass.rindex("HGMMA")]
        assert not re.search(r"\b(?:LDL|STL)\b", loop)
