"""Linears: parts, biases, shards, and weights that are packed once."""

from __future__ import annotations

import pytest
import torch
from built import build
from llmcore.api.errors import ConfigError
from llmcore.layers import Linear, Mesh, Rows, create_linears
from llmcore.registry.modes import Pins
from llmcore.weights.load import dummy_weights
from llmcore.weights.map import Shard


def test_linear_parts_bias_and_sharding() -> None:
    made = build(mesh=Mesh({"attn_tp": 2}, {"attn_tp": 1}))
    linear = Linear(made, 8, {"q_proj": 8, "k_proj": 4}, bias=True, shard=Shard("attn_tp", 0, 2))
    create_linears(linear)
    assert linear.weight.shape == (6, 8)
    assert linear.placements["weight"].parts == {"q_proj": (0, 4), "k_proj": (4, 2)}
    with pytest.raises(ConfigError, match="multiples of 2"):
        Linear(made, 8, {"q_proj": 6}, shard=Shard("attn_tp", 0, 2))
    with pytest.raises(ConfigError, match=r"no op 'comm\.all_reduce'"):
        Linear(made, 8, 8, shard=Shard("attn_tp", 1))
    with pytest.raises(ConfigError, match="no mesh group 'rows'"):
        Linear(made, 8, 8, shard=Shard("rows", 0))


def test_weights_are_packed_once_and_only_if_all_buckets_agree() -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 8)
    for pins in ({}, {"linear": "torch"}):
        linear = Linear(build(pins=Pins(kernels=pins)), 8, 5, bias=True)
        create_linears(linear)
        dummy_weights(linear)
        if "weight" not in dict(linear.named_parameters()):
            packed = linear(x, Rows(1))
        else:
            torch.testing.assert_close(linear(x, Rows(1)), x @ linear.weight.T + linear.bias)
            plain = linear(x, Rows(1))
    torch.testing.assert_close(packed, plain, rtol=1e-5, atol=1e-6)
