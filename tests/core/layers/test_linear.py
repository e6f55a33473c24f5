"""Linears: parts, biases, shards, weights that are packed once, and the order of the outputs of quantized ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from built import build
from held import Held
from llmcore.api import TOKEN_BUCKETS, Placement
from llmcore.api.errors import ConfigError
from llmcore.layers import Build, Linear, LinearShape, Mesh, PairedQKV, Rows, create_linears, fill_normal
from llmcore.registry.modes import Pins
from llmcore.weights.load import dummy_weights, load_weights
from llmcore.weights.map import Shard, WeightMap
from torch import nn


def test_linear_parts_bias_and_sharding() -> None:
    made = build(mesh=Mesh({"attn_tp": 2}, {"attn_tp": 1}))
    linear = Linear(made, 8, {"q_proj": 8, "k_proj": 4}, bias=True, shard=Shard("attn_tp", 0, 2))
    create_linears(linear)
    assert linear.weight.shape == (6, 8)
    assert linear.placements["weight"].parts == {"q_proj": (0, 4), "k_proj": (4, 2)}
    with pytest.raises(ConfigError, match="multiples of 2"):
        Linear(made, 8, {"q_proj": 6}, shard=Shard("attn_tp", 0, 2))
    inputs = Linear(made, 8, 8, shard=Shard("attn_tp", 1))
    create_linears(inputs)
    dummy_weights(inputs)
    with pytest.raises(ConfigError, match=r"comm\.all_reduce over 2 ranks of attn_tp needs their connection"):
        inputs(torch.zeros(1, 4), Rows(0))
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


# --- a linear in int8 with the columns in another order: some tensors have a row per output, some do not ------------


class Ordered:
    """The LinearMethod. `blocks`: outputs that share a scale."""

    activations: frozenset[str] = frozenset()
    multiples = (1, 1)

    def __init__(self, blocks: int = 1) -> None:
        self.blocks = blocks

    def create(self, shape: LinearShape, build: Build) -> Codes:
        return Codes(shape, self.blocks)


class Codes:
    def __init__(self, shape: LinearShape, blocks: int) -> None:
        def held(*size: int, dtype: torch.dtype) -> nn.Parameter:
            return nn.Parameter(torch.zeros(size, dtype=dtype), requires_grad=False)

        self.codes = held(shape.outputs, shape.inputs, dtype=torch.int8)
        self.scale = held(shape.outputs // blocks, dtype=torch.float32)
        self.order = held(shape.inputs, dtype=torch.int32)
        self.shape, self.blocks = shape, blocks

    def tensors(self) -> Mapping[str, tuple[nn.Parameter, Placement]]:
        rows, every = self.shape.placement(columns=False), dict.fromkeys(self.shape.parts, (0, self.shape.inputs))
        return {
            "codes": (self.codes, self.shape.placement()),
            "scale": (self.scale, rows),
            "order": (self.order, Placement(every, by_output=False)),
        }

    def bind(self) -> tuple[tuple[Any, ...], frozenset[str]]:
        def call(x: torch.Tensor) -> torch.Tensor:
            return x[:, self.order] @ (self.codes.T * self.scale.repeat_interleave(self.blocks))

        return (call,) * len(TOKEN_BUCKETS), frozenset()

    def fill_dummy(self, name: str, tensor: torch.Tensor, generator: torch.Generator) -> None:
        if name == "codes":
            tensor.random_(-127, 128, generator=generator)
        elif name == "order":
            tensor.copy_(torch.arange(len(tensor)).flip(0))
        else:
            fill_normal(name, tensor, generator)


HEADS: dict[str, int] = {"heads": 2, "kv_heads": 1, "key_size": 4, "rotated": 4}


def paired(blocks: int = 1) -> PairedQKV:
    linear = PairedQKV(build(), 16, **HEADS)
    create_linears(linear, lambda modules: Ordered(blocks))
    return linear


def test_neighbours_of_a_quantized_linear_are_taken_apart() -> None:
    """Codes and scales move with their outputs; the order of the inputs, of as many numbers, stays."""
    linear = paired()
    assert linear.shape.inputs == linear.shape.outputs
    x = torch.randn(3, 16, generator=torch.Generator().manual_seed(0))
    plain = paired()
    for one in (linear, plain):
        for name, parameter in one.named_parameters():
            one.fill_dummy(name, parameter.data, torch.Generator().manual_seed(len(name)))
    Linear.finish(plain)
    linear.finish()
    before, after = plain(x, Rows(1)), linear(x, Rows(1))
    turned = [0, 2, 1, 3]
    order = [4 * head + lane for head in range(3) for lane in turned] + [12, 13, 14, 15]
    assert torch.equal(after, before[:, order]) and not torch.equal(after, before)


def test_outputs_that_cannot_be_put_in_order_are_refused() -> None:
    linear = paired(blocks=2)
    with pytest.raises(ConfigError, match="quantized in blocks of outputs, cannot be put in another order"):
        linear.finish()


@pytest.mark.parametrize("stacked", [True, False])
def test_tensors_without_rows_fill_every_part(stacked: bool) -> None:
    """From a tensor for each module, or from the one of a checkpoint that stacks the modules itself."""
    codes, scale = torch.arange(-128, 128).to(torch.int8).view(16, 16), torch.arange(16.0)
    order = torch.arange(16, dtype=torch.int32).flip(0)
    whole = nn.Module()
    whole.qkv_proj = Linear(build(), 16, {"q_proj": 8, "k_proj": 4, "v_proj": 4})
    create_linears(whole, lambda modules: Ordered())
    rows = {"qkv_proj": (0, 16)} if stacked else {"q_proj": (0, 8), "k_proj": (8, 4), "v_proj": (12, 4)}
    tensors = {}
    for module, (first, count) in rows.items():
        tensors[f"{module}__codes"] = codes[first : first + count]
        tensors[f"{module}__scale"] = scale[first : first + count]
        tensors[f"{module}__order"] = order
    weighed = load_weights(whole, Held(**tensors), WeightMap(fuse={"qkv_proj": ("q_proj", "k_proj", "v_proj")}))
    linear = whole.qkv_proj
    assert torch.equal(linear.codes, codes) and torch.equal(linear.scale, scale) and torch.equal(linear.order, order)
    assert (weighed.parameters, weighed.bytes) == (16 * 16, 16 * 16 + 16 * 4 + 16 * 4)
