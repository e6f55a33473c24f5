"""The kernels of a draw from a part of the vocabulary, compiled for a Hopper. It is half of a Llama's, or empty."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from compiled_for_hopper import compiling, instructions
from llmcore.api.specs import DeviceInfo, OpContext
from llmcore.ops.sample import plain_rows

H200 = DeviceInfo("cuda", "NVIDIA H200", capability=90, processors=132)


def made(name: str, bucket: int) -> Any:
    shape = {"vocab": 128256, "ranks": 2}
    where = OpContext(op=f"sample.{name}", device=H200, dtype="bf16", shape=shape, bucket=bucket)  # type: ignore[arg-type]
    return import_module(f"llmcore_triton.sample.{name}").make(where)


@pytest.mark.parametrize(("width", "bucket"), [(64128, 0), pytest.param(0, 1, marks=pytest.mark.compiled)])
def test_the_kernels_compile_and_keep_to_their_registers(
    width: int, bucket: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    best, part, pick = (made(name, bucket) for name in ("best", "part", "pick"))
    compiled = compiling(tmp_path, monkeypatch)
    rows, logits = plain_rows(4, temperature=0.7), torch.zeros(4, width, dtype=torch.bfloat16)
    columns = best(logits, 64128)
    found = torch.stack((columns, columns))
    drawn = torch.stack((part(logits, 64128, found, rows),) * 2)
    tokens, finite = pick(found, drawn, rows.temperature)
    assert (tokens.shape, finite.shape) == ((4,), (4,))
    assert [kernel.metadata.name for kernel in compiled] == ["_peak", "_column", "_weigh", "_choose", "_pick"]
    for kernel in compiled:
        assert not re.findall(r"\b(?:LDL|STL)\b", instructions(kernel, tmp_path)), kernel.metadata.name
