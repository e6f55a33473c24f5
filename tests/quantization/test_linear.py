"""Linears of a scheme: their tensors and where a checkpoint's go, their products, cuts over ranks, dummy weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from llmcore.api import ConfigError, DeviceInfo, Shard
from llmcore.layers import Build, Linear, Mesh, PairedQKV, Rows, create_linears
from llmcore.weights.load import dummy_weights, load_weights
from llmcore.weights.map import WeightMap
from llmcore_devtools.conformance_observing import CONFIG
from llmcore_devtools.loaded_model import registry_for_tests
from llmcore_quantization.canonical import Scheme, dequantized
from llmcore_quantization.linear import Quantized, op_of
from llmcore_quantization.rounding import quantized
from torch import nn

REGISTRY = registry_for_tests()

SCHEMES = {
    "w4a16": Scheme(codes="u4", group=32, zeros=True),
    "w4a16 ordered": Scheme(codes="u4", group=32, zeros=True, ordered=True),
    "w8a16": Scheme(codes="i8", scale="f32"),
    "w8a16 groups": Scheme(codes="e4m3", group=64, scale="bf16"),
    "w8a8": Scheme(codes="i8", scale="f32", inputs="row"),
    "w8a8 static": Scheme(codes="e4m3", scale="f32", inputs="static"),
    "fp8_block": Scheme(codes="e4m3", group=128, scale="f32", inputs="group"),
}
INPUTS, PARTS = 128, {"q_proj": 48, "k_proj": 16, "v_proj": 16}


def build(mesh: Mesh | None = None) -> Build:
    return Build(
        registry=REGISTRY,
        config=replace(CONFIG, dtype="f32"),
        device=DeviceInfo("cpu"),
        torch_device=torch.device("cpu"),
        mesh=mesh or Mesh(),
    )


def created(linear: Linear, scheme: Scheme) -> nn.Module:
    """The linear as `qkv_proj` of a module, with its tensors."""
    whole = nn.Module()
    whole.qkv_proj = linear
    create_linears(whole, lambda modules: Quantized(scheme))
    return whole


def tensors(scheme: Scheme, rows: int, seed: int) -> dict[str, torch.Tensor]:
    weight = torch.randn(rows, INPUTS, generator=torch.Generator().manual_seed(seed))
    found = quantized(weight, scheme)
    if scheme.ordered:
        found["order"] = torch.randperm(INPUTS, generator=torch.Generator().manual_seed(9), dtype=torch.int32)
    if scheme.inputs == "static":
        found["input_scale"] = torch.tensor([0.004 + 0.001 * seed])
    return found


class Stored:
    """A checkpoint of tensors."""

    def __init__(self, held: Mapping[str, torch.Tensor]) -> None:
        self.held = held

    def sizes(self) -> dict[str, tuple[tuple[int, ...], str]]:
        return {name: (tuple(tensor.shape), str(tensor.dtype)) for name, tensor in self.held.items()}

    def tensors(self) -> Any:
        yield from ((name, lambda tensor=tensor: tensor) for name, tensor in self.held.items())


def load(model: nn.Module, held: Mapping[str, torch.Tensor], mesh: Mesh | None = None) -> None:
    load_weights(model, Stored(held), WeightMap(fuse={"qkv_proj": tuple(PARTS)}), mesh=mesh)  # type: ignore[arg-type]


def weight_of(found: Mapping[str, torch.Tensor]) -> torch.Tensor:
    return dequantized(found["codes"], found["scale"], found.get("zero"), found.get("order"))


@pytest.mark.parametrize("name", SCHEMES)
def test_a_stacked_linear_multiplies_what_the_parts_of_the_checkpoint_mean(name: str) -> None:
    scheme = SCHEMES[name]
    parts = {part: tensors(scheme, rows, seed) for seed, (part, rows) in enumerate(PARTS.items())}
    held = {f"{part}.{leaf}": tensor for part, found in parts.items() for leaf, tensor in found.items()}
    generator = torch.Generator().manual_seed(5)
    held |= {f"{part}.bias": torch.randn(rows, generator=generator) for part, rows in PARTS.items()}
    model = created(Linear(build(), INPUTS, PARTS, bias=True), scheme)
    load(model, held)
    x = torch.randn(3, INPUTS, generator=torch.Generator().manual_seed(1))
    weight = torch.cat([weight_of(found) for found in parts.values()])
    bias = torch.cat([held[f"{part}.bias"] for part in PARTS])
    seen = x if scheme.inputs == "plain" else _rounded(x, scheme, 0.006)  # the largest of the parts' static scales
    for step in (Rows(0), Rows(1), Rows(4)):
        torch.testing.assert_close(model.qkv_proj(x, step), seen @ weight.T + bias, rtol=1e-4, atol=1e-4)


def _rounded(x: torch.Tensor, scheme: Scheme, static: float) -> torch.Tensor:
    groups = x.view(len(x), -1, scheme.group or INPUTS)
    limit = 127 if scheme.codes == "i8" else 448
    scale = groups.abs().amax(-1, keepdim=True) / limit if scheme.inputs != "static" else torch.tensor(static)
    values = (groups / scale).clamp(-limit, limit)
    codes = values.round() if scheme.codes == "i8" else values.to(torch.float8_e4m3fn).float()
    return (codes * scale).view_as(x)


def test_tensors_take_their_packed_bytes() -> None:
    model = created(Linear(build(), INPUTS, PARTS), SCHEMES["w4a16"])
    held = dict(model.qkv_proj.named_parameters())
    assert {name: (tuple(t.shape), t.dtype) for name, t in held.items()} == {
        "codes": ((80, 64), torch.uint8),
        "scale": ((80, 4), torch.float16),
        "zero": ((80, 4), torch.uint8),
    }


def test_parts_that_are_ordered_differently_are_an_error() -> None:
    scheme = SCHEMES["w4a16 ordered"]
    held = {f"{p}.{leaf}": t for p, rows in PARTS.items() for leaf, t in tensors(scheme, rows, 0).items()}
    held["k_proj.order"] = held["k_proj.order"].flip(0)
    with pytest.raises(
        ConfigError, match="q_proj and k_proj and v_proj of qkv_proj have groups of inputs in different"
    ):
        load(created(Linear(build(), INPUTS, PARTS), scheme), held)


def test_a_stack_that_the_checkpoint_made_itself() -> None:
    """One tensor of all inputs stands for all parts."""
    for name in ("w4a16 ordered", "w8a8 static"):
        scheme = SCHEMES[name]
        found = tensors(scheme, sum(PARTS.values()), 2)
        model = created(Linear(build(), INPUTS, PARTS), scheme)
        load(model, {f"qkv_proj.{leaf}": tensor for leaf, tensor in found.items()})
        x = torch.randn(2, INPUTS, generator=torch.Generator().manual_seed(1))
        seen = x if scheme.inputs == "plain" else _rounded(x, scheme, 0.006)
        torch.testing.assert_close(model.qkv_proj(x, Rows(1)), seen @ weight_of(found).T, rtol=1e-4, atol=1e-4)


def test_outputs_are_reordered_with_their_scales_and_zeros() -> None:
    scheme = SCHEMES["w4a16"]
    sizes = {"q_proj": 32, "k_proj": 16, "v_proj": 16}
    linear = PairedQKV(build(), INPUTS, heads=4, kv_heads=2, key_size=8, rotated=4)
    model = created(linear, scheme)
    parts = {part: tensors(scheme, rows, seed) for seed, (part, rows) in enumerate(sizes.items())}
    load(model, {f"{part}.{leaf}": tensor for part, found in parts.items() for leaf, tensor in found.items()})
    head = torch.tensor([0, 2, 1, 3, 4, 5, 6, 7])
    turned = {"q_proj": 4, "k_proj": 2}
    weight = torch.cat(
        [
            weight_of(found)[torch.cat([8 * index + head for index in range(turned[part])])]
            if part in turned
            else weight_of(found)
            for part, found in parts.items()
        ]
    )
    x = torch.randn(2, INPUTS, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(linear(x, Rows(1)), x @ weight.T, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "dim"),
    [(name, dim) for name in SCHEMES for dim in (0, 1) if dim == 0 or name not in ("w4a16 ordered", "fp8_block")],
)
def test_ranks_hold_their_cut(name: str, dim: int) -> None:
    """Two ranks, along outputs or along inputs: the parts of the results are those of the whole."""
    scheme = SCHEMES[name]
    found = tensors(scheme, 40, 3)
    weight = weight_of(found)
    for rank in range(2):
        mesh = Mesh({"moe_tp": 2}, {"moe_tp": rank})
        linear = _cut(mesh, dim)
        model = created(linear, scheme)
        load(model, {f"qkv_proj.{leaf}": tensor for leaf, tensor in found.items()}, mesh)
        held = {leaf: parameter.data for leaf, parameter in linear.named_parameters()}
        assert torch.equal(weight_of(held), weight.chunk(2, dim)[rank])


def _cut(mesh: Mesh, dim: int) -> Linear:
    made = build(mesh)
    made.reduce = lambda group: None  # type: ignore[method-assign]  # no op of this version sums over ranks
    return Linear(made, INPUTS, 40, shard=Shard("moe_tp", dim))


def test_cuts_that_do_not_fit_are_declined() -> None:
    mesh = Mesh({"moe_tp": 2}, {"moe_tp": 0})
    with pytest.raises(ConfigError, match=r"order \(desc_act\), which cannot be cut over ranks"):
        created(_cut(mesh, 1), SCHEMES["w4a16 ordered"])
    with pytest.raises(
        ConfigError, match=r"128 inputs of qkv_proj cannot be cut over 2 .* multiples of 128, .* --tp that works is 1"
    ):
        created(_cut(mesh, 1), SCHEMES["fp8_block"])
    assert Quantized(Scheme(codes="u4")).multiples == (1, 2)  # two inputs share a byte


@pytest.mark.parametrize(
    ("inputs", "advice"), [(96, "groups of 32 do"), (72, "use a scale per row instead of groups")]
)
def test_a_group_that_does_not_divide_the_inputs_is_one_error(inputs: int, advice: str) -> None:
    with pytest.raises(ConfigError, match=f"qkv_proj: groups of 64 inputs do not divide {inputs}; {advice}"):
        created(Linear(build(), inputs, 8), Scheme(codes="u4", group=64))


@pytest.mark.parametrize(
    "scheme",
    [
        Scheme(codes="u4", inputs="row"),
        Scheme(codes="i8", group=64, inputs="row"),
        Scheme(codes="i8", group=128, inputs="group"),
        Scheme(codes="i8", zeros=True, inputs="static"),
        Scheme(codes="e4m3", group=128, ordered=True, inputs="group"),
    ],
)
def test_a_scheme_without_an_op_is_an_error(scheme: Scheme) -> None:
    with pytest.raises(ConfigError, match="no op multiplies weights of Scheme"):
        op_of(scheme)


@pytest.mark.parametrize("name", SCHEMES)
def test_dummy_weights_have_random_bits_and_the_spread_of_real_ones(name: str) -> None:
    model = created(Linear(build(), INPUTS, PARTS, bias=True), SCHEMES[name])
    dummy_weights(model)
    held = {leaf: parameter.data for leaf, parameter in model.qkv_proj.named_parameters()}
    if "order" in held:
        held["order"] = held["order"][:INPUTS]
        assert held["order"].sort().values.tolist() == list(range(INPUTS))
    weight = weight_of(held)
    assert weight.isfinite().all() and 0.018 < weight.std() < 0.022
    assert len(held["codes"].view(torch.uint8).unique()) > 200
    assert 0.01 < held["bias"].std() < 0.03
    y = model.qkv_proj(torch.randn(2, INPUTS, generator=torch.Generator().manual_seed(1)), Rows(1))
    assert y.isfinite().all() and y.std() > 0.05
