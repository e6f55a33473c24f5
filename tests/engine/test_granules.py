"""Tokens per granule follow from the kernels there are and from pins."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from llmcore.engine.granules import DryBuild, settle_granules
from llmcore.models import AttnSpec
from llmcore.modes import Pins
from llmcore.specs import DeviceInfo
from llmcore_devtools import fake_config, registry_of

KERNELS = """
from llmcore.api import KernelSpec, Requires, hookimpl
@hookimpl
def register_kernels():
    for kind in {kinds}:
        for granule in (16, 4):
            yield KernelSpec(
                op=f"attn.gqa.{{kind}}", name=f"g{{granule}}", make=f"llmcore.ops.attn_gqa_{{kind}}:make",
                priority=10 + granule, when=Requires(granules=frozenset({{granule}})),
            )
"""
SPEC = AttnSpec(heads=2, kv_heads=1, key_size=4, value_size=4, scale=1.0)
BOTH = ("decode", "prefill")


def chosen(
    tmp_path: Path, kinds: tuple[str, ...], *, sdpa: bool, pins: dict[str, str] | None = None
) -> dict[str, int]:
    file = tmp_path / "paged.py"
    file.write_text(KERNELS.format(kinds=kinds))
    build = DryBuild(
        registry=registry_of(str(file), *(() if sdpa else ("-kernels_cpu",))),
        config=fake_config.read_config({"vocab_size": 9, "max_position_embeddings": 64, "eos_token_id": 1}),
        device=DeviceInfo("cpu"),
        torch_device=torch.device("meta"),
        pins=Pins(kernels=pins or {}),
    )
    return settle_granules(build, lambda config, build: build.attention(SPEC, "kv"))


@pytest.mark.parametrize(
    ("kinds", "sdpa", "pins", "granule"),
    [
        ((), False, {}, 1),
        (BOTH, False, {}, 4),
        (BOTH, True, {}, 1),
        (("decode",), False, {}, 1),
        (BOTH, True, {"attn.gqa.decode": "g4"}, 4),
        (BOTH, True, {"attn.gqa.decode": "g16"}, 16),
        (BOTH, True, {"attn.gqa.decode": "torch"}, 1),
    ],
)
def test_the_smallest_that_all_can_take(
    tmp_path: Path, kinds: tuple[str, ...], sdpa: bool, pins: dict[str, str], granule: int
) -> None:
    assert chosen(tmp_path, kinds, sdpa=sdpa, pins=pins) == {"kv": granule}
