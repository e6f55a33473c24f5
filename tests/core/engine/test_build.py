"""The salt and the fingerprint of an engine say how it stores KV: the layouts and their constants."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from llmcore.api.protocols import Int32, Int64
from llmcore.builtin.radix import RadixCache
from llmcore.engine.llm import LLM
from llmcore_quantization.kv.calibration import write_file

MakeLLM = Callable[..., LLM]
Built = tuple[frozenset[bytes], str]
"""The salts under which an engine looked for prompts, and its fingerprint."""


@pytest.fixture
def built(make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Built]:
    """`built(**settings)` serves a prompt."""
    salts, match = set[bytes](), RadixCache.match

    def recording(cache: RadixCache, salt: bytes, content: Int64) -> Int32:
        salts.add(salt)
        return match(cache, salt, content)

    monkeypatch.setattr(RadixCache, "match", recording)

    def built(**settings: Any) -> Built:
        salts.clear()
        llm = make_llm(**settings)
        llm.generate([[1, 2, 3]], max_new_tokens=1)
        return frozenset(salts), llm.facts.fingerprint

    return built


def test_scales_of_fp8_kv_are_part_of_both(built: Callable[..., Built], tmp_path: Path) -> None:
    """KV that was stored with other scales means other numbers."""

    def with_scale(scale: float) -> Built:
        file = tmp_path / "scales.json"
        write_file(file, "LlmcoreFake", "per_tensor", torch.full((1, 2, 1), scale * 448))
        return built(llm_kv_type="fp8kv_spt", kv_quant_calibration_config_path=str(file))

    (salts, fingerprint), same, (others, other) = with_scale(0.5), with_scale(0.5), with_scale(0.25)
    assert len(salts) == 1 and same == (salts, fingerprint)
    assert not salts & others and fingerprint != other


def test_layouts_are_part_of_both(built: Callable[..., Built]) -> None:
    (salts, fingerprint), (others, other) = built(), built(mode=("triton_int8kv",))
    assert len(salts) == len(others) == 1
    assert not salts & others and fingerprint != other
