"""GatedMLP: gate, up and activation in one op, and what happens where no kernel or no method knows it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from llmcore.api import KernelSpec, ModelConfig, OpContext, PluginInfo, Requires, hookimpl
from llmcore.api.errors import ConfigError
from llmcore.api.specs import DeviceInfo
from llmcore.layers import Bound, Build, GatedMLP, LinearShape, MethodFor, Rows, create_linears
from llmcore.layers.build import Unquantized
from llmcore.ops import linear_silu_and_mul
from llmcore.registry.modes import Pins
from llmcore.registry.registry import Registry
from llmcore_devtools.loaded_model import registry_for_tests

CONFIG = ModelConfig(
    architecture="Test", vocab_size=10, hidden_size=24, num_layers=1, max_position=10, dtype="f32", kv_groups=()
)
FUSED: list[int] = []


class Plain:
    """A method for linears alone."""

    activations: frozenset[str] = frozenset()
    multiples = (1, 1)

    def create(self, shape: LinearShape, build: Build) -> Bound:
        assert shape.activation is None
        return Unquantized().create(shape, build)


def make_fused(context: OpContext) -> Any:
    assert dict(context.shape) == {"inputs": 24, "size": 40, "bias": True}

    def fused(*args: Any) -> torch.Tensor:
        FUSED.append(context.bucket)
        return linear_silu_and_mul.reference(*args)

    return fused


def with_fused() -> Registry:
    class Plugin:
        @staticmethod
        @hookimpl
        def register_kernels() -> list[KernelSpec]:
            make, when = f"{__name__}:make_fused", Requires(buckets=frozenset({0, 1}))
            return [KernelSpec(op="linear_silu_and_mul", name="fused", make=make, when=when)]

    registry = registry_for_tests()
    registry.add(PluginInfo("mine", "mine", "1", "mine"), lambda info: Plugin)
    assert not registry.failures
    return registry


def run(build: Build, method_for: MethodFor | None = None) -> tuple[GatedMLP, list[torch.Tensor]]:
    mlp = GatedMLP(build, 24, 40, bias=True)
    create_linears(mlp, method_for)
    torch.manual_seed(0)
    for parameter in mlp.parameters():
        parameter.data.normal_(std=0.2)
    weights = {name: parameter.clone() for name, parameter in mlp.named_parameters()}
    mlp.gate_up_proj.finish()
    mlp.down_proj.finish()
    results = []
    for tokens, bucket in ((1, 0), (5, 1), (70, 3)):
        x = torch.randn(tokens, 24)
        y = mlp(x, Rows(bucket))
        gate, up = (x @ weights["gate_up_proj.weight"].T + weights["gate_up_proj.bias"]).chunk(2, dim=-1)
        inner = torch.nn.functional.silu(gate) * up
        expected = inner @ weights["down_proj.weight"].T + weights["down_proj.bias"]
        torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-4)
        results.append(y)
    return mlp, results


def build(**more: Any) -> Build:
    registry = more.pop("registry", None) or registry_for_tests()
    return Build(registry=registry, config=CONFIG, device=DeviceInfo("cpu"), torch_device=torch.device("cpu"), **more)


def test_the_expansion_packs_the_weight_as_its_linear_does() -> None:
    made = build()
    mlp, _ = run(made)
    linears = {r.chosen.name for r in made.resolutions if r.context.op == "linear"}
    assert {r.chosen.name for r in made.resolutions if r.context.op == "linear_silu_and_mul"} == {"torch"}
    assert ("gate_up_proj.weight" in dict(mlp.named_parameters())) is (linears != {"onednn"})
    plain, _ = run(build(pins=Pins(kernels={"linear": "torch"})))
    assert "gate_up_proj.weight" in dict(plain.named_parameters())


def test_a_kernel_for_both_is_used_where_it_fits() -> None:
    FUSED.clear()
    mlp, _ = run(build(registry=with_fused()))
    assert FUSED == [0, 1]
    # the kernel takes the plain weight, so that is what stays for all buckets
    assert "gate_up_proj.weight" in dict(mlp.named_parameters())


def test_a_method_that_knows_no_activation_gets_it_applied() -> None:
    made = build()
    _, results = run(made, lambda modules: Plain())
    assert "linear_silu_and_mul" not in {r.context.op for r in made.resolutions}
    for one, other in zip(results, run(build())[1], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_an_unknown_activation_is_named() -> None:
    with pytest.raises(ConfigError, match="no op 'no_such'"):
        create_linears(GatedMLP(build(), 24, 40, activation="no_such"))
