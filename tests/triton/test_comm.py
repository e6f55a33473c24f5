"""The kernels over several ranks compile for a Hopper."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from compiled_for_hopper import compiling, instructions
from llmcore.api.specs import DeviceInfo, OpContext
from llmcore_triton.comm.one_shot import OneShot
from llmcore_triton.comm.shared import BITS, Shared

H200 = DeviceInfo("cuda", "NVIDIA H200", capability=90, processors=132)


def test_kernels_compile_for_a_hopper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = compiling(tmp_path, monkeypatch)

    def slots(element: int) -> Shared:
        nothing = torch.empty(1, dtype=torch.int64)
        return Shared(1, 2, 1 << 24, torch.empty(1, dtype=BITS[element]), nothing, nothing.int())

    for dtype in (torch.bfloat16, torch.float32):
        shape = {"group": "attn_tp", "ranks": 2, "size": 4096}
        op = OneShot(slots, OpContext(op="comm.all_reduce", device=H200, dtype="bf16", bucket=1, shape=shape))
        x = torch.empty(3, 4096, dtype=dtype)
        op.sum(x)
        op.add_norm(x, x.clone(), x[0], 1e-5)
        op.stacked(x)
    assert len(compiled) == 6
    for kernel in compiled:
        text = instructions(kernel, tmp_path)
        assert "LDG.E.128.STRONG.SYS" in text  # a receiver reads 16 bytes at once, and not from the L1 cache
        assert "BPT.TRAP" in text  # a rank that waits for too long ends
