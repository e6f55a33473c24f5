"""Linears of a scheme: their tensors and where a checkpoint's go, their products, cuts over ranks, dummy weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from llmcore.api import ConfigError, DeviceInfo, KernelSpec, OpContext, PluginInfo, Requires, Shard, hookimpl
from llmcore.layers import (
    Build,
    GatedMLP,
    Linear,
    LMHead,
    Mesh,
    OffsetRMSNorm,
    PairedQKV,
    RMSNorm,
    Rounded,
    Rows,
    create_linears,
    tensor_parallel,
)
from llmcore.registry.registry import Registry
from llmcore.weights.load import dummy_weights, load_weights
from llmcore.weights.map import WeightMap
from llmcore_devtools.conformance_observing import CONFIG
from llmcore_devtools.loaded_model import registry_for_tests
from llmcore_quantization.canonical import Scheme, dequantized
from llmcore_quantization.linear import Quantized, op_of
from llmcore_quantization.ops import linear_w4a16
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


def build(mesh: Mesh | None = None, dtype: str = "f32") -> Build:
    return Build(
        registry=REGISTRY,
        config=replace(CONFIG, dtype=dtype),  # type: ignore[arg-type]
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


class Halves(nn.Module):
    """A norm and a linear, then an MLP behind a norm of its own. `fused`: the linears have sources."""

    def __init__(self, made: Build, fused: bool, kind: type[RMSNorm]) -> None:
        super().__init__()
        self.first, self.second = kind(made, INPUTS, 1e-5), kind(made, INPUTS, 1e-5)
        self.qkv_proj = Linear(made, INPUTS, PARTS, source=self.first if fused else None)
        self.mlp = GatedMLP(made, INPUTS, 256, source=self.second if fused else None)
        if not fused:
            self.mlp.down_proj.read(None)

    def forward(self, x: torch.Tensor, residual: torch.Tensor, step: Rows) -> tuple[torch.Tensor, ...]:
        read, total = self.second.add(x, residual.clone(), step)
        return self.qkv_proj(self.first(x, step), step), self.mlp(read, step), total


def halves(
    scheme: Scheme | None, fused: bool, kind: type[RMSNorm] = RMSNorm, dtype: str = "f32"
) -> tuple[Halves, set[str]]:
    """The module with dummy weights, and the ops that it resolved."""
    made = build(dtype=dtype)
    module = Halves(made, fused, kind)
    create_linears(module, lambda modules: scheme and Quantized(scheme))
    dummy_weights(module)
    return module, {resolution.context.op for resolution in made.resolutions}


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("kind", [RMSNorm, OffsetRMSNorm])
@pytest.mark.parametrize("name", [None, *SCHEMES])
def test_what_a_source_writes_changes_no_bit(name: str | None, kind: type[RMSNorm], dtype: str) -> None:
    scheme = None if name is None else SCHEMES[name]
    (one, fused), (other, plain) = (halves(scheme, fused, kind, dtype=dtype) for fused in (True, False))
    writes = scheme is not None and scheme.inputs in ("row", "group")
    assert fused - plain == ({"rms_norm_quant", "add_rms_norm_quant", "silu_and_mul_quant"} if writes else set())
    generator = torch.Generator().manual_seed(1)
    x, residual = torch.randn(2, 5, INPUTS, generator=generator).to(one.first._build.dtype)
    for step in (Rows(0), Rows(1), Rows(4)):
        assert all(map(torch.equal, one(x, residual, step), other(x, residual, step)))
    if writes:
        codes, scale = one.first(x, Rows(1))
        assert codes.dtype.itemsize == 1 and scale.dtype == torch.float32
    else:
        assert isinstance(one.first(x, Rows(1)), torch.Tensor)


class Adapter(nn.Module):
    """A plugin's module around another, which computes with a tensor."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor, step: Rows) -> torch.Tensor:
        assert isinstance(x, torch.Tensor)
        y = self.inner(x, step)
        assert isinstance(y, torch.Tensor)
        return y


@pytest.mark.parametrize(
    ("path", "writing"),
    [
        ("", "first second gate_up"),
        ("qkv_proj", "second gate_up"),
        ("first", "second gate_up"),
        ("mlp", "first gate_up"),
        ("mlp.gate_up_proj", "first"),
        ("mlp.down_proj", "first second"),
    ],
)
def test_a_wrapper_between_a_source_and_its_linear_gets_tensors(path: str, writing: str) -> None:
    module, plain = Halves(build(), True, RMSNorm), halves(SCHEMES["w8a8"], True)[0]
    parts = {"first": module.first, "second": module.second, "gate_up": module.mlp.gate_up_proj}
    if path:
        module.set_submodule(path, Adapter(module.get_submodule(path)))
        module.wrapped = {path: f"{path}.inner"}  # as a Decoder has it
    create_linears(module, lambda modules: Quantized(SCHEMES["w8a8"]))
    values = {name: parameter.data for name, parameter in plain.named_parameters()}
    for name, parameter in module.named_parameters():
        parameter.data.copy_(values[name.replace("inner.", "")])
    for linear in (part for part in module.modules() if isinstance(part, Linear)):
        linear.finish()
    x, residual = torch.randn(2, 5, INPUTS, generator=torch.Generator().manual_seed(1))
    assert all(map(torch.equal, module(x, residual, Rows(1)), plain(x, residual, Rows(1))))
    found = {name for name, part in parts.items() if isinstance(part(x, Rows(1)), Rounded)}
    assert found == set(writing.split())


class Packs:
    """A kernel of linear.w4a16 that packs: codes in int16, scale and zero by group, and takes the plain form too."""

    packing = "test"

    def __init__(self, context: OpContext) -> None:
        assert context.shape["codes"] == "u4"

    def pack(
        self, codes: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None, order: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        turned = None if zero is None else zero.t().contiguous()
        return codes.view(torch.int16).clone(), scale.t().contiguous(), turned, order

    def __call__(
        self,
        x: torch.Tensor,
        codes: torch.Tensor,
        scale: torch.Tensor,
        zero: torch.Tensor | None,
        order: torch.Tensor | None,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        PACKED.append(codes.dtype)
        if codes.dtype == torch.int16:
            codes, scale, zero = codes.view(torch.uint8), scale.t(), None if zero is None else zero.t()
        return linear_w4a16.reference(x, codes, scale, zero, order, bias)


PACKED: list[torch.dtype] = []


def packing_registry(buckets: set[int]) -> Registry:
    class Plugin:
        @staticmethod
        @hookimpl
        def register_kernels() -> list[KernelSpec]:
            when = Requires(buckets=frozenset(buckets))
            return [KernelSpec(op="linear.w4a16", name="packs", make=f"{__name__}:Packs", when=when)]

    registry = registry_for_tests()
    registry.add(PluginInfo("mine", "mine", "1", "mine"), lambda info: Plugin)
    assert not registry.failures
    return registry


@pytest.mark.parametrize("buckets", [{0, 1, 2, 3, 4}, {0, 1}])
@pytest.mark.parametrize("activation", [None, "silu_and_mul"])
@pytest.mark.parametrize("name", ["w4a16", "w4a16 ordered", "w8a16"])
def test_tensors_are_packed_once_if_all_kernels_pack_alike(
    name: str, activation: str | None, buckets: set[int]
) -> None:
    builds = (replace(build(), registry=registry) for registry in (packing_registry(buckets), REGISTRY))
    linears = (Linear(found, INPUTS, PARTS, bias=True, activation=activation) for found in builds)
    made, plain = (created(linear, SCHEMES[name]) for linear in linears)
    for model in (made, plain):
        dummy_weights(model)
    held, before = (dict(model.qkv_proj.named_parameters()) for model in (made, plain))
    packs = name != "w8a16" and len(buckets) == 5
    assert before.keys() - held.keys() == ({"codes", "scale", "zero"} if packs else set())
    assert made.qkv_proj._bound.tensors().keys() == held.keys()
    PACKED.clear()
    x = torch.randn(3, INPUTS, generator=torch.Generator().manual_seed(1))
    for bucket in (0, 1, 4):
        torch.testing.assert_close(made.qkv_proj(x, Rows(bucket)), plain.qkv_proj(x, Rows(bucket)))
    assert ([] if name == "w8a16" else [torch.int16 if packs else torch.uint8] * (3 if packs else 2)) == PACKED


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


@pytest.mark.parametrize("outlier", [1.0, 20.0])
def test_ranks_that_round_their_own_inputs_lose_no_more_than_one_rank(outlier: float) -> None:
    """A rank's part of a row has a maximum of its own, which is never above the row's."""
    scheme = SCHEMES["w8a8"]
    found = tensors(scheme, 40, 3)
    held = {f"qkv_proj.{leaf}": tensor for leaf, tensor in found.items()}
    x = torch.randn(64, INPUTS, generator=torch.Generator().manual_seed(1))
    x[::4, 5] *= outlier
    whole = Linear(build(), INPUTS, 40)
    load(created(whole, scheme), held)
    total = torch.zeros(64, 40)
    for rank in range(2):
        mesh = Mesh({"moe_tp": 2}, {"moe_tp": rank})
        linear = Linear(build(mesh), INPUTS, 40, shard=Shard("moe_tp", 1), partial=True)
        load(created(linear, scheme), held, mesh)
        total += linear(x.chunk(2, 1)[rank], Rows(1)).tensor
    exact = x @ weight_of(found).T
    cut, one = ((y - exact).square().mean().sqrt() for y in (total, whole(x, Rows(1))))
    assert 0 < cut < one


def _cut(mesh: Mesh, dim: int) -> Linear:
    return Linear(build(mesh), INPUTS, 40, shard=Shard("moe_tp", dim))


@pytest.mark.parametrize("name", SCHEMES)
def test_ranks_share_a_head(name: str) -> None:
    """Of 140 tokens the first rank has a block of 128, the second has 12, and 116 rows without a token."""
    scheme = SCHEMES[name]
    found = tensors(scheme, 140, 3)
    weight, x = weight_of(found), torch.randn(2, INPUTS, generator=torch.Generator().manual_seed(1))
    seen = x if scheme.inputs == "plain" else _rounded(x, scheme, float(found.get("input_scale", torch.zeros(1))))
    for rank in range(2):
        head = LMHead(build(tensor_parallel(rank, 2)), INPUTS, 140)
        model = created(head, scheme)
        load(model, {f"qkv_proj.{leaf}": tensor for leaf, tensor in found.items()}, tensor_parallel(rank, 2))
        own = head.own(x, Rows(1))
        torch.testing.assert_close(own, seen @ weight[128 * rank :][:128].T, rtol=1e-4, atol=1e-4)


def test_cuts_that_do_not_fit_are_declined() -> None:
    mesh = Mesh({"moe_tp": 2}, {"moe_tp": 0})
    with pytest.raises(ConfigError, match=r"cannot be cut over ranks; serve the model on one rank, or .* desc_act"):
        created(_cut(mesh, 1), SCHEMES["w4a16 ordered"])
    with pytest.raises(
        ConfigError, match=r"128 inputs of qkv_proj cannot be cut over 2 .* multiples of 128, .* --tp can be 1$"
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
    assert weight.isfinite().all() and 0.018 < weight.std() < 0.022 and abs(weight.mean()) < 0.002
    assert len(held["codes"].view(torch.uint8).unique()) > 200
    assert 0.01 < held["bias"].std() < 0.03
    scales = len(held["scale"][:, 0].unique())
    assert scales == 1 if name == "fp8_block" else scales > 10, "as published: a scale for 128 outputs, or for each"
    y = model.qkv_proj(torch.randn(2, INPUTS, generator=torch.Generator().manual_seed(1)), Rows(1))
    assert y.isfinite().all() and y.std() > 0.05
