"""Routing, dispatch and combine: numbers worked out by hand, and the routers of transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from llmcore.api import OpContext, RouteSpec
from llmcore.api.specs import DeviceInfo
from llmcore.ops import moe, moe_combine, moe_dispatch, moe_experts, moe_fused, moe_route, packing
from transformers.models.deepseek_v2.configuration_deepseek_v2 import DeepseekV2Config
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
from transformers.models.deepseek_v3.configuration_deepseek_v3 import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.mixtral.configuration_mixtral import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter


def context(op: str, **shape: Any) -> OpContext:
    return OpContext(op=op, device=DeviceInfo("cpu"), dtype="f32", bucket=1, shape=shape)


def route(spec: RouteSpec, logits: list[list[float]], bias: list[float] | None = None) -> tuple[Any, Any]:
    """Weights and experts where these are the logits: the router is the identity."""
    x = torch.tensor(logits)
    correction = None if bias is None else torch.tensor(bias)
    op = moe_route.make(context("moe.route", **moe.shape_of(spec), bias=bias is not None))
    weights, experts = op(x, torch.eye(spec.experts), correction)
    assert weights.dtype == torch.float32 and experts.dtype == torch.int32
    return weights, experts.tolist()


def logs(*odds: float) -> list[float]:
    """Logits whose softmax is these over their sum."""
    return torch.tensor(odds).log().tolist()


def logits(*scores: float) -> list[float]:
    """Logits whose sigmoid is these."""
    return torch.tensor(scores).logit().tolist()


def near(weights: torch.Tensor, *expected: list[float]) -> None:
    torch.testing.assert_close(weights, torch.tensor(expected), rtol=1e-5, atol=1e-6)


def test_softmax_over_all_experts_before_the_choice() -> None:
    weights, experts = route(RouteSpec(experts=4, top_k=2), [logs(1, 4, 2, 3), logs(6, 1, 2, 1)])
    assert experts == [[1, 3], [0, 2]]
    near(weights, [0.4, 0.3], [0.6, 0.2])


def test_normalize_and_scale() -> None:
    weights, _ = route(RouteSpec(experts=4, top_k=2, normalize=True, scale=2.5), [logs(1, 4, 2, 3), logs(6, 1, 2, 1)])
    near(weights, [2.5 * 4 / 7, 2.5 * 3 / 7], [2.5 * 0.75, 2.5 * 0.25])


def test_of_equals_the_first() -> None:
    spec = RouteSpec(experts=6, top_k=3)
    assert route(spec, [logs(1, 1, 1, 1, 1, 1), logs(1, 2, 1, 2, 2, 2)])[1] == [[0, 1, 2], [1, 3, 4]]
    grouped = RouteSpec(experts=6, top_k=2, groups=3, top_groups=2)
    # of three equal groups the first two
    assert route(grouped, [logs(1, 2, 2, 1, 2, 2)])[1] == [[1, 2]]


def test_sigmoid_scores_do_not_share() -> None:
    weights, experts = route(RouteSpec(experts=3, top_k=2, scoring="sigmoid"), [logits(0.9, 0.2, 0.8)])
    assert experts == [[0, 2]]
    near(weights, [0.9, 0.8])


def test_a_correction_is_seen_by_the_choice_alone() -> None:
    spec = RouteSpec(experts=3, top_k=2, scoring="sigmoid", normalize=True)
    weights, experts = route(spec, [logits(0.9, 0.2, 0.6)], bias=[-1.0, 0.5, 0.0])
    # the choice sees -0.1, 0.7 and 0.6
    assert experts == [[1, 2]]
    near(weights, [0.25, 0.75])


def test_groups_by_their_best_expert() -> None:
    spec = RouteSpec(experts=6, top_k=2, groups=3, top_groups=1)
    # the second group has the larger sum, the third the best expert
    weights, experts = route(spec, [logs(1, 1, 5, 5, 6, 2)])
    assert experts == [[4, 5]]
    near(weights, [0.3, 0.1])


def test_groups_by_their_two_best() -> None:
    spec = RouteSpec(experts=9, top_k=2, scoring="sigmoid", groups=3, top_groups=1, group_score="top2")
    # the first group's two best make 0.9, the second's 1.0, all three of the third 1.2
    scores = [0.8, 0.1, 0.05, 0.5, 0.5, 0.01, 0.4, 0.4, 0.4]
    assert route(spec, [logits(*scores)])[1] == [[3, 4]]
    # with the correction the first's make 1.1
    assert route(spec, [logits(*scores)], bias=[0.0, 0.2] + [0.0] * 7)[1] == [[0, 1]]


def test_negative_choices_beat_experts_outside_the_groups() -> None:
    spec = RouteSpec(experts=4, top_k=2, scoring="sigmoid", groups=2, top_groups=1, group_score="top2")
    weights, experts = route(spec, [logits(0.5, 0.5, 0.5, 0.25)], bias=[-3.0, -3.0, -1.0, -2.0])
    assert experts == [[2, 3]]
    near(weights, [0.5, 0.25])


def by_expert(weights: torch.Tensor, experts: torch.Tensor, count: int) -> torch.Tensor:
    """[T, count] weights, 0 where not chosen: transformers does not say in what order it gives them."""
    return torch.zeros(len(weights), count).scatter(1, experts.long(), weights)


SIZE, TOKENS = 32, 50
MIXTRAL = [(1, 1), (8, 2), (33, 7)]
V2 = [(64, 6, 1, 1), (60, 4, 5, 2), (16, 8, 8, 4)]
V3 = [(64, 8, 8, 3, True), (12, 3, 3, 2, False), (32, 4, 1, 1, True)]


def compare(theirs: torch.nn.Module, spec: RouteSpec, bias: torch.Tensor | None = None) -> None:
    torch.manual_seed(spec.experts)
    torch.nn.init.normal_(theirs.weight, std=0.5)
    x = torch.randn(TOKENS, SIZE)
    with torch.inference_mode():
        _, *expected = theirs(x)
        got = moe_route.make(context("moe.route", **moe.shape_of(spec), bias=bias is not None))(x, theirs.weight, bias)
    assert bool((got[1].sort().values.diff() > 0).all())
    torch.testing.assert_close(by_expert(*got, spec.experts), by_expert(*expected, spec.experts), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("experts", "top_k"), MIXTRAL)
def test_mixtral(experts: int, top_k: int) -> None:
    config = MixtralConfig(hidden_size=SIZE, num_local_experts=experts, num_experts_per_tok=top_k)
    compare(MixtralTopKRouter(config), RouteSpec(experts=experts, top_k=top_k, normalize=True))


@pytest.mark.parametrize(("experts", "top_k", "groups", "top_groups"), V2)
def test_deepseek_v2(experts: int, top_k: int, groups: int, top_groups: int) -> None:
    config = DeepseekV2Config(
        hidden_size=SIZE,
        n_routed_experts=experts,
        num_experts_per_tok=top_k,
        n_group=groups,
        topk_group=top_groups,
        topk_method="greedy" if groups == 1 else "group_limited_greedy",
        routed_scaling_factor=16.0,
    )
    spec = RouteSpec(experts=experts, top_k=top_k, groups=groups, top_groups=top_groups, scale=16.0)
    compare(DeepseekV2TopkRouter(config), spec)


@pytest.mark.parametrize(("experts", "top_k", "groups", "top_groups", "normalize"), V3)
def test_deepseek_v3(experts: int, top_k: int, groups: int, top_groups: int, normalize: bool) -> None:
    config = DeepseekV3Config(
        hidden_size=SIZE,
        n_routed_experts=experts,
        num_experts_per_tok=top_k,
        n_group=groups,
        topk_group=top_groups,
        norm_topk_prob=normalize,
        routed_scaling_factor=2.5,
    )
    spec = RouteSpec(
        experts=experts,
        top_k=top_k,
        scoring="sigmoid",
        normalize=normalize,
        scale=2.5,
        groups=groups,
        top_groups=top_groups,
        group_score="top2",
    )
    theirs = DeepseekV3TopkRouter(config)
    torch.manual_seed(top_k)
    bias = torch.randn(experts)
    theirs.e_score_correction_bias.copy_(bias)
    compare(theirs, spec, bias)


def test_dispatch_sorts_pairs_by_expert() -> None:
    x = torch.randn(3, 8)
    sent = moe_dispatch.make(context("moe.dispatch", experts=4, top_k=2))(
        x, torch.tensor([[3, 0], [0, 1], [3, 1]], dtype=torch.int32)
    )
    assert sent.x is x
    assert sent.pairs.tolist() == [1, 2, 3, 5, 0, 4]
    assert sent.starts.tolist() == [0, 2, 4, 4, 6]
    assert {sent.pairs.dtype, sent.starts.dtype} == {torch.int32}


def test_experts_write_at_the_pairs_place_and_combine_weighs_them() -> None:
    x, chosen = torch.tensor([[1.0], [2.0]]), torch.tensor([[1, 0], [0, 1]], dtype=torch.int32)
    sent = moe_dispatch.make(context("moe.dispatch", experts=2, top_k=2))(x, chosen)
    gate_up = torch.tensor([[[40.0], [1.0]], [[40.0], [2.0]]])
    # silu(40 x) up x = 40 x * up x, times down
    y = moe_experts.make(context("moe.experts", experts=2, top_k=2, size=1, inner=1))(
        sent, gate_up, torch.tensor([[[1.0]], [[0.5]]])
    )
    assert y.tolist() == [[40.0], [40.0], [160.0], [160.0]]
    y[1] = 100.0
    weights = torch.tensor([[0.25, 0.5], [1.0, 2.0]])
    combine = moe_combine.reference
    assert combine(y, weights).tolist() == [[60.0], [480.0]]
    assert combine(y, weights, torch.tensor([[1.0], [-480.0]])).tolist() == [[61.0], [0.0]]


def test_a_mixture_packs_weights_as_its_experts_do() -> None:
    """Whether a kernel or the expansion serves a bucket: a layer packs once for all."""

    class Kernel:
        packing = "reversed"

        def pack(self, weight: torch.Tensor) -> torch.Tensor:
            return weight.flip(0)

    def nothing(*arguments: Any) -> None: ...

    kernel = Kernel()
    fused = [moe_fused.Fused(nothing, nothing, experts, nothing) for experts in (kernel, nothing)]  # type: ignore[arg-type]
    assert packing([kernel, fused[0]]) == kernel.pack and packing([fused[0]]) == kernel.pack
    assert packing(fused) is None
