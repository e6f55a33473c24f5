"""MoE: the op against a plain loop, what each rank holds, further experts, and how checkpoints fill it."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from llmcore.api import KernelSpec, ModelConfig, OpContext, OpSpec, PluginInfo, RouteSpec, WeightMap, hookimpl
from llmcore.api.errors import ConfigError
from llmcore.api.specs import DeviceInfo, bucket_of
from llmcore.layers import (
    Bucketed,
    Build,
    LinearMethod,
    Mesh,
    MoE,
    Rows,
    Unquantized,
    create_linears,
    expert_names,
)
from llmcore.registry.modes import Pins
from llmcore.registry.registry import Registry
from llmcore.weights.load import dummy_weights, load_weights
from llmcore.weights.source import open_checkpoint
from llmcore_devtools.loaded_model import registry_for_tests
from safetensors.torch import save_file
from torch import nn

SIZE, INNER = 20, 6
"""The inner size is one that two and three ranks can share."""
ROUTES = {
    "one expert": RouteSpec(experts=1, top_k=1),
    "all of them": RouteSpec(experts=3, top_k=3, normalize=True),
    "few of many": RouteSpec(experts=64, top_k=8, normalize=True, scale=2.5),
    "groups": RouteSpec(experts=12, top_k=3, groups=4, top_groups=2),
}


def build(ranks: int = 1, rank: int = 0, registry: Registry | None = None, **more: Any) -> Build:
    return Build(
        registry=registry or registry_for_tests(),
        config=ModelConfig(
            architecture="Test",
            vocab_size=10,
            hidden_size=SIZE,
            num_layers=1,
            max_position=10,
            dtype="f32",
            kv_groups=(),
        ),
        device=DeviceInfo("cpu"),
        torch_device=torch.device("cpu"),
        mesh=Mesh({"moe_tp": ranks}, {"moe_tp": rank}),
        **more,
    )


def checkpoint(
    route: RouteSpec, corrected: bool = False, names: str = "gate_proj up_proj down_proj"
) -> dict[str, Any]:
    """As families save it: every expert by itself."""
    torch.manual_seed(route.experts)
    gate, up, down = names.split()
    tensors = {"mlp.gate.weight": torch.randn(route.experts, SIZE)}
    if corrected:
        tensors["mlp.gate.e_score_correction_bias"] = torch.randn(route.experts)
    for expert in range(route.experts):
        for name, shape in ((gate, (INNER, SIZE)), (up, (INNER, SIZE)), (down, (SIZE, INNER))):
            tensors[f"mlp.experts.{expert}.{name}.weight"] = torch.randn(shape) / 4
    return tensors


def holder(moe: MoE) -> nn.Module:
    whole = nn.Module()
    whole.mlp = moe
    return whole


FUSE = {"gate_up_proj": ("gate_proj", "up_proj")}


def loaded(
    moe: MoE, tensors: dict[str, Any], mesh: Mesh | None = None, method: LinearMethod | None = None, **names: str
) -> MoE:
    """Filled from a file. `method`: of all linears."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text("{}")
        save_file(tensors, Path(folder) / "model.safetensors")
        checkpoint = open_checkpoint(registry_for_tests(), Path(folder))
        whole, map = holder(moe), WeightMap(fuse=FUSE, stack=expert_names(**names))
        create_linears(whole, lambda modules: method)
        load_weights(whole, checkpoint, map, mesh=mesh)
    return moe


def plain(tensors: dict[str, Any], route: RouteSpec, x: torch.Tensor) -> torch.Tensor:
    """Token by token, expert by expert, for a softmax without correction."""
    out = torch.zeros_like(x)
    for token, row in enumerate(x):
        scores = F.softmax(tensors["mlp.gate.weight"] @ row, dim=0)
        size = route.experts // route.groups
        best = sorted(range(route.groups), key=lambda g: -float(scores[g * size : (g + 1) * size].max()))
        allowed = [expert for expert in range(route.experts) if expert // size in best[: route.top_groups]]
        chosen = sorted(allowed, key=lambda expert: -float(scores[expert]))[: route.top_k]
        total = sum(float(scores[expert]) for expert in chosen) if route.normalize else 1.0
        for expert in chosen:
            gate, up, down = (tensors[f"mlp.experts.{expert}.{name}_proj.weight"] for name in ("gate", "up", "down"))
            out[token] += scores[expert] / total * route.scale * (down @ (F.silu(gate @ row) * (up @ row)))
    return out


@pytest.mark.parametrize("name", ROUTES)
def test_a_plain_loop(name: str) -> None:
    route, tensors = ROUTES[name], checkpoint(ROUTES[name])
    moe = loaded(MoE(build(), SIZE, INNER, route), tensors)
    for tokens in (1, 5, 40):
        x = torch.randn(tokens, SIZE)
        torch.testing.assert_close(moe(x, Rows(bucket_of(tokens))), plain(tensors, route, x), rtol=1e-4, atol=1e-4)


def make_part(context: OpContext) -> Any:
    assert context.shape["inner"] == INNER
    return lambda tokens, gate_up, down: torch.ones(len(tokens.pairs), SIZE)


SHARES: list[torch.Tensor] = []


def registry_with(*kernels: KernelSpec, ops: tuple[OpSpec, ...] = ()) -> Registry:
    class Plugin:
        @staticmethod
        @hookimpl
        def register_kernels() -> list[KernelSpec]:
            return list(kernels)

        @staticmethod
        @hookimpl
        def register_ops() -> list[OpSpec]:
            return list(ops)

    registry = registry_for_tests()
    registry.add(PluginInfo("mine", "mine", "1", "mine"), lambda info: Plugin)
    assert not registry.failures
    return registry


def test_a_kernel_of_one_part_is_used_in_the_whole() -> None:
    kernel = KernelSpec(op="moe.experts", name="ones", make=f"{__name__}:make_part")
    route = RouteSpec(experts=4, top_k=2, normalize=True)
    made = build(registry=registry_with(kernel), pins=Pins(kernels={"moe.fused": "torch"}))
    moe = loaded(MoE(made, SIZE, INNER, route), checkpoint(route))
    torch.testing.assert_close(moe(torch.randn(3, SIZE), Rows(1)), torch.ones(3, SIZE))


class WithExtra(MoE):
    """All tokens see one thing more."""

    def extra(self, x: torch.Tensor, step: Bucketed) -> torch.Tensor:
        return 3 * x


def test_extra_is_added_to_the_sum() -> None:
    route = ROUTES["all of them"]
    tensors, x = checkpoint(route), torch.randn(7, SIZE)
    moe = loaded(WithExtra(build(), SIZE, INNER, route), tensors)
    torch.testing.assert_close(moe(x, Rows(1)), plain(tensors, route, x) + 3 * x, rtol=1e-4, atol=1e-4)


def with_shared(tensors: dict[str, Any]) -> dict[str, Any]:
    """A checkpoint with a gated MLP that all tokens see, of twice the experts' width."""
    torch.manual_seed(5)
    shapes = {"gate_proj": (2 * INNER, SIZE), "up_proj": (2 * INNER, SIZE), "down_proj": (SIZE, 2 * INNER)}
    more = {f"mlp.shared_experts.{name}.weight": torch.randn(shape) / 4 for name, shape in shapes.items()}
    return {**tensors, **more}


def seen_by_all(tensors: dict[str, Any], x: torch.Tensor) -> torch.Tensor:
    gate, up, down = (tensors[f"mlp.shared_experts.{name}_proj.weight"] for name in ("gate", "up", "down"))
    return (F.silu(x @ gate.T) * (x @ up.T)) @ down.T


@pytest.mark.parametrize("method", [None, Unquantized()], ids=["in one op", "linears"])
def test_an_mlp_that_all_tokens_see(method: LinearMethod | None) -> None:
    """Its parts are cut over the ranks as the experts are, and it is in each rank's share of the sum.

    With a method it consists of linears, whatever these call their tensors.
    """
    route, x = ROUTES["all of them"], torch.randn(7, SIZE)
    tensors = with_shared(checkpoint(route))
    expected = plain(tensors, route, x) + seen_by_all(tensors, x)
    alone = loaded(WithExtra(build(), SIZE, INNER, route, shared=2 * INNER), tensors, method=method)
    assert alone.shared_experts is not None and alone.shared_experts.plain == (method is None)
    torch.testing.assert_close(alone(x, Rows(1)), expected + 3 * x, rtol=1e-4, atol=1e-4)
    SHARES.clear()
    registry = registry_of_ranks()
    for rank in range(2):
        made = build(2, rank, registry)
        moe = loaded(WithExtra(made, SIZE, INNER, route, shared=2 * INNER), tensors, made.mesh, method)
        torch.testing.assert_close(moe(x, Rows(1)), 3 * x)
    torch.testing.assert_close(sum(SHARES), expected, rtol=1e-4, atol=1e-4)


def registry_of_ranks() -> Registry:
    kernel = KernelSpec(op="comm.all_reduce", name="mine", make=f"{__name__}:sum_of_ranks")
    return registry_with(kernel)


def sum_of_ranks(context: OpContext) -> Any:
    """Stands in for the other ranks: the test adds their shares."""
    assert context.shape["group"] == "moe_tp" and context.shape["size"] == SIZE

    def reduce(y: torch.Tensor) -> torch.Tensor:
        SHARES.append(y)
        return torch.zeros_like(y)

    return reduce


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("fused", [False, True])
def test_ranks_cut_every_experts_inner_size(ranks: int, fused: bool) -> None:
    """Their results add up, and what all tokens see is added once, after the sum."""
    SHARES.clear()
    route = ROUTES["few of many"]
    tensors = checkpoint(route)
    given = stacks(tensors, route.experts) if fused else tensors
    registry, x = registry_of_ranks(), torch.randn(9, SIZE)
    for rank in range(ranks):
        made = build(ranks, rank, registry)
        moe = loaded(WithExtra(made, SIZE, INNER, route), given, made.mesh)
        assert moe.experts.gate_up_proj.shape == (route.experts * 2 * INNER // ranks, SIZE)
        assert moe.experts.down_proj.shape == (route.experts * SIZE, INNER // ranks)
        torch.testing.assert_close(moe(x, Rows(1)), 3 * x)
    torch.testing.assert_close(sum(SHARES), plain(tensors, route, x), rtol=1e-4, atol=1e-4)


def test_an_inner_size_that_ranks_cannot_share_is_refused() -> None:
    with pytest.raises(ConfigError, match="inner of 6 cannot be cut over 4 ranks of moe_tp"):
        MoE(build(4), SIZE, INNER, ROUTES["one expert"])


def stacks(tensors: dict[str, Any], experts: int) -> dict[str, Any]:
    """The same checkpoint with the experts' stacks in it."""

    def each(name: str) -> list[torch.Tensor]:
        return [tensors[f"mlp.experts.{expert}.{name}_proj.weight"] for expert in range(experts)]

    gate_up = torch.stack([torch.cat(pair) for pair in zip(each("gate"), each("up"), strict=True)])
    rest = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    return {**rest, "mlp.experts.gate_up_proj": gate_up, "mlp.experts.down_proj": torch.stack(each("down"))}


@pytest.mark.parametrize("name", ["one expert", "groups"])
def test_every_way_to_save_experts_fills_the_same_memory(name: str) -> None:
    route = ROUTES[name]
    tensors = checkpoint(route, corrected=True)
    old = {name.replace("gate_proj", "w1").replace("up_proj", "w3"): tensor for name, tensor in tensors.items()}
    moes = [
        loaded(MoE(build(), SIZE, INNER, route, corrected=True), tensors),
        loaded(MoE(build(), SIZE, INNER, route, corrected=True), old, gate="w1", up="w3"),
        loaded(MoE(build(), SIZE, INNER, route, corrected=True), stacks(tensors, route.experts)),
    ]
    x = torch.randn(11, SIZE)
    for moe in moes:
        assert torch.equal(moe(x, Rows(1)), moes[0](x, Rows(1)))
        assert torch.equal(moe.gate.e_score_correction_bias, tensors["mlp.gate.e_score_correction_bias"])
        # views, not copies
        where = {tensor.data_ptr() for tensor in moe._weights}
        assert where == {parameter.data_ptr() for parameter in moe.parameters()}


def test_what_is_missing_is_named_by_expert() -> None:
    route = ROUTES["all of them"]
    tensors = checkpoint(route)
    del tensors["mlp.experts.1.up_proj.weight"], tensors["mlp.experts.2.down_proj.weight"]
    tensors["mlp.experts.3.up_proj.weight"] = torch.randn(INNER, SIZE)
    with pytest.raises(ConfigError) as error:
        loaded(MoE(build(), SIZE, INNER, route), tensors)
    assert "missing: mlp.experts.1.up_proj.weight, mlp.experts.2.down_proj.weight;" in str(error.value)
    assert "unexpected: mlp.experts.3.up_proj.weight" in str(error.value)


def test_dummy_weights_are_small_normal_numbers() -> None:
    route = RouteSpec(experts=32, top_k=2, scoring="sigmoid", groups=4, top_groups=2, group_score="top2")
    moe = MoE(build(), SIZE, INNER, route, corrected=True)
    whole = holder(moe)
    create_linears(whole)
    assert dummy_weights(whole).bytes == 4 * (32 * SIZE + 32 + 32 * 3 * INNER * SIZE)
    for parameter in moe.parameters():
        assert abs(float(parameter.std()) - 0.02) < 0.01
    assert bool(moe(torch.randn(300, SIZE), Rows(4)).isfinite().all())
