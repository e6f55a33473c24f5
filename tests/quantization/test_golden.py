"""Weights that the libraries of the formats packed: the readers find what these libraries say that they mean."""

from __future__ import annotations

import json
from pathlib import Path

import packers
import pytest
import torch
from opened import Opened
from safetensors import safe_open

FOLDER = Path(__file__).parent / "golden"
MODULE = "model.layers.0.self_attn.q_proj"
DTYPES = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}


@pytest.mark.parametrize("file", sorted(FOLDER.glob("*.safetensors")), ids=lambda file: file.stem)
@pytest.mark.parametrize("keep", [False, True], ids=["plain", "kept"])
def test_what_a_library_packed(file: Path, keep: bool, tmp_path: Path) -> None:
    with safe_open(file, framework="pt") as stored:
        config = json.loads(stored.metadata()["quantization_config"])
        tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
    expected = tensors.pop("expected")
    folder = packers.write(tmp_path, {"quantization_config": config}, tensors)
    found = Opened(folder, [(MODULE,)] if keep else [], DTYPES[expected.dtype])
    if found.schemes == [None]:
        assert file.stem == "ct_mxfp4"
    weight = found.meaning(MODULE).to(expected.dtype) if any(found.schemes) else found.tensors[f"{MODULE}.weight"]
    assert torch.equal(weight, expected)
