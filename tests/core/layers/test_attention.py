"""Attention as a layer: what happens to queries and keys between the projection and the attention kernel."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from llmcore.api.errors import ConfigError
from llmcore.api.models import AttnSpec, KVGroupSpec, ModelConfig
from llmcore.api.specs import DeviceInfo
from llmcore.layers import Attention, Build, Linear, QKVLinear, RMSNorm, create_linears
from llmcore.layers.rope import Rope, RopeConfig
from llmcore.layers.step import KVStep, Step
from llmcore.ops import rms_norm, rope, rope_angles
from llmcore_devtools import registry_of

HEADS, KV_HEADS, SIZE, TOKENS = 4, 2, 8, 5
CONFIG = ModelConfig(
    architecture="Test",
    vocab_size=10,
    hidden_size=12,
    num_layers=1,
    max_position=32,
    dtype="f32",
    kv_groups=(KVGroupSpec(name="all", layers=(0,), kv_heads=KV_HEADS, key_size=SIZE, value_size=SIZE),),
)


def attention(eps: float = 1e-6, k_eps: float = 1e-6) -> tuple[Build, Attention]:
    build = Build(
        registry=registry_of("ops", "layouts"),
        config=CONFIG,
        device=DeviceInfo("cpu"),
        torch_device=torch.device("cpu"),
    )
    spec = AttnSpec(heads=HEADS, kv_heads=KV_HEADS, key_size=SIZE, value_size=SIZE, scale=0.4)
    parts: dict[str, Any] = {
        "qkv": QKVLinear(build, 12, heads=HEADS, kv_heads=KV_HEADS, key_size=SIZE),
        "out": Linear(build, HEADS * SIZE, 12),
        "rope": Rope(build, RopeConfig(rotated=SIZE, original=32)),
        "norms": (RMSNorm(build, SIZE, eps), RMSNorm(build, SIZE, k_eps)),
    }
    layer = Attention(build, spec, group="all", index=0, **parts)
    create_linears(layer)
    generator = torch.Generator().manual_seed(0)
    for parameter in layer.parameters():
        parameter.data.normal_(generator=generator)
    layer.qkv_proj.finish()
    layer.o_proj.finish()
    return build, layer


def test_heads_are_normed_before_they_turn() -> None:
    build, layer = attention()
    seen: list[torch.Tensor] = []

    class Kernel:
        def run(self, q: torch.Tensor, k: torch.Tensor, *rest: Any) -> torch.Tensor:
            seen.extend((q.clone(), k.clone()))
            out: torch.Tensor = rest[3]
            return out.zero_()

    layer._kernels = layer._kernels._replace(prefill=(Kernel(),) * 5)  # type: ignore[arg-type]
    kv = build.layout("all").layer_tensors(9, torch.device("cpu"))
    slots = torch.tensor([3, 1, 4, 8, 5])
    positions = torch.arange(TOKENS, dtype=torch.int32)
    step = Step(
        bucket=1,
        n_decode=0,
        tokens=torch.zeros(TOKENS, dtype=torch.int64),
        positions=positions[None],
        prompt_len=torch.full((TOKENS,), TOKENS, dtype=torch.int32),
        sampled=None,
        kv={"all": KVStep(kv={0: kv}, slots=slots, decode={}, prefill={})},
    )
    x = torch.randn(TOKENS, 12, generator=torch.Generator().manual_seed(1))
    joined = layer.qkv_proj(x, step).view(TOKENS, -1, SIZE)
    q, k, v = joined.split((HEADS, KV_HEADS, KV_HEADS), 1)
    layer(x, step)
    cos, sin = rope_angles.reference(positions, 1e4 ** -(torch.arange(0, SIZE, 2) / SIZE), 1.0)
    assert layer.q_norm is not None and layer.k_norm is not None
    q = rope.reference(rms_norm.reference(q, layer.q_norm.weight, 1e-6), cos, sin)
    k = rope.reference(rms_norm.reference(k, layer.k_norm.weight, 1e-6), cos, sin)
    for got, expected in ((seen[0], q), (seen[1], k), (kv[0][slots], k), (kv[1][slots], v)):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def test_norms_of_one_eps() -> None:
    with pytest.raises(ConfigError, match="one eps, not 1e-06 and 1e-05"):
        attention(k_eps=1e-5)
