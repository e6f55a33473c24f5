"""Build: kernels per bucket, composites and their expansion, pins, KV groups, and slices of a decoder."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from llmcore.api import AttnSpec, KernelSpec, KVGroupSpec, ModelConfig, OpContext, Requires, hookimpl
from llmcore.api.errors import ConfigError, PluginError, ResolveError
from llmcore.api.specs import DeviceInfo, PluginInfo
from llmcore.layers import Build, Decoder, Linear, Mesh, RMSNorm, Rows
from llmcore.ops import add_rms_norm
from llmcore.registry.modes import Pins
from llmcore.registry.registry import Registry
from llmcore.weights.load import dummy_weights
from llmcore.weights.map import Shard
from llmcore_devtools import registry_of
from llmcore_devtools.family import small_model
from llmcore_devtools.loaded_model import LoadedModel, Row, registry_for_tests

CONFIG = ModelConfig(
    architecture="Test",
    vocab_size=10,
    hidden_size=8,
    num_layers=1,
    max_position=10,
    dtype="f32",
    kv_groups=(KVGroupSpec(name="all", layers=(0,), kv_heads=1, key_size=4, value_size=4),),
)


def build(registry: Registry | None = None, **more: Any) -> Build:
    return Build(
        registry=registry or registry_for_tests(),
        config=more.pop("config", CONFIG),
        device=DeviceInfo("cpu"),
        torch_device=torch.device("cpu"),
        **more,
    )


CALLS: list[str] = []


def make_norm(context: OpContext) -> Any:
    def norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        CALLS.append(f"rms_norm in bucket {context.bucket}")
        return torch.nn.functional.rms_norm(x, weight.shape, weight, eps)

    return norm


def make_fused(context: OpContext) -> Any:
    def fused(*args: Any) -> Any:
        CALLS.append("fused")
        return add_rms_norm.reference(*args)

    return fused


def make_broken(context: OpContext) -> Any:
    raise RuntimeError("no such instruction")


def with_kernels(*kernels: KernelSpec) -> Registry:
    class Plugin:
        @staticmethod
        @hookimpl
        def register_kernels() -> list[KernelSpec]:
            return list(kernels)

    registry = registry_for_tests()
    registry.add(PluginInfo("mine", "mine", "1", "mine"), lambda info: Plugin)
    assert not registry.failures
    return registry


def kernel(op: str, name: str, make: str, **more: Any) -> KernelSpec:
    return KernelSpec(op=op, name=name, make=f"{__name__}:{make}", **more)


@pytest.fixture(autouse=True)
def no_calls() -> None:
    CALLS.clear()


def norm_twice(registry: Registry) -> None:
    norm = RMSNorm(build(registry), 8, 1e-5)
    norm.weight.fill_(1.0)
    for tokens, bucket in ((1, 0), (20, 2)):
        x = torch.randn(tokens, 8)
        y, total = norm.add(x, x, Rows(bucket))
        torch.testing.assert_close(total, 2 * x)
        torch.testing.assert_close(y, torch.nn.functional.rms_norm(2 * x, (8,), eps=1e-5))


def test_a_composite_without_kernel_is_made_of_its_parts_kernels() -> None:
    norm_twice(with_kernels(kernel("rms_norm", "mine", "make_norm")))
    assert CALLS == ["rms_norm in bucket 0", "rms_norm in bucket 2"]


def test_a_kernel_for_a_composite_is_used_where_it_fits() -> None:
    fused = kernel("add_rms_norm", "mine", "make_fused", when=Requires(buckets=frozenset({0})))
    norm_twice(with_kernels(fused))
    assert CALLS == ["fused"]


def test_a_pin_wins_and_equal_requests_share() -> None:
    registry = with_kernels(kernel("rms_norm", "mine", "make_norm"))
    pinned = build(registry, pins=Pins(kernels={"rms_norm": "torch"}))
    ops = pinned.op("rms_norm", size=8)
    assert ops is pinned.op("rms_norm", size=8)
    assert {choice.chosen.name for choice in pinned.resolutions} == {"torch"}
    assert len(pinned.resolutions) == 5
    assert set(pinned.chosen().values()) == {"torch"}


def test_errors_name_the_fix() -> None:
    with pytest.raises(PluginError, match=r"plugin 'mine' failed.*no such instruction.*--kernel rms_norm=torch"):
        build(with_kernels(kernel("rms_norm", "mine", "make_broken"))).op("rms_norm", size=8)
    with pytest.raises(ConfigError, match="no op 'rms_nrom'"):
        build().op("rms_nrom")
    two = with_kernels(kernel("rms_norm", "a", "make_norm"), kernel("rms_norm", "b", "make_norm"))
    with pytest.raises(ResolveError, match="--kernel rms_norm="):
        build(two).op("rms_norm", size=8)


def test_a_group_has_one_kind_of_attention() -> None:
    spec = AttnSpec(heads=2, kv_heads=1, key_size=4, value_size=4, scale=0.5)
    made = build()
    assert made.attention(spec, "all") is made.attention(spec, "all")
    assert made.attention_kernels["all"].decode[0] is not None
    with pytest.raises(ConfigError, match="declare two groups"):
        made.attention(replace(spec, window=3), "all")
    with pytest.raises(ConfigError, match="has no KV group 'other'"):
        made.attention(spec, "other")


def test_attention_falls_back_to_torch_where_sdpa_declines() -> None:
    made = build()
    made.attention(AttnSpec(heads=2, kv_heads=1, key_size=4, value_size=4, scale=0.5, soft_cap=20.0), "all")
    assert {r.chosen.name for r in made.resolutions} == {"torch"}
    assert "soft cap" in made.resolutions[0].reasons["sdpa"]


def test_linear_parts_bias_and_sharding() -> None:
    made = build(mesh=Mesh({"attn_tp": 2}, {"attn_tp": 1}))
    linear = Linear(made, 8, {"q_proj": 8, "k_proj": 4}, bias=True, shard=Shard("attn_tp", 0, 2))
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
        dummy_weights(linear)
        if "weight" not in dict(linear.named_parameters()):
            packed = linear(x, Rows(1))
        else:
            torch.testing.assert_close(linear(x, Rows(1)), x @ linear.weight.T + linear.bias)
            plain = linear(x, Rows(1))
    torch.testing.assert_close(packed, plain, rtol=1e-5, atol=1e-6)


def test_slices_of_a_decoder_compute_what_the_whole_does(tmp_path: Path) -> None:
    small_model("LlamaForCausalLM").save_pretrained(tmp_path)
    whole = LoadedModel(tmp_path)
    first, last = LoadedModel(tmp_path), LoadedModel(tmp_path)
    for part, kept in ((first, {"0"}), (last, {"1", "2"})):
        blocks = dict(part.model.layers.items())
        part.model = Decoder(
            part.build,
            lambda index, blocks=blocks: blocks[str(index)],
            layers=range(0, 1) if "0" in kept else range(1, 3),
            embedding=part.model.embed_tokens if "0" in kept else None,
            norm=None if "0" in kept else part.model.norm,
            head=None if "0" in kept else part.model.lm_head,
        )
        assert set(part.model.layers) == kept
    assert first.model.elsewhere("layers.2.mlp.down_proj.weight")
    assert first.model.elsewhere("norm.weight")
    assert not first.model.elsewhere("layers.0.mlp.down_proj.weight")
    rows = [Row(0, (5, 6, 7, 8), 0, 4)]
    with torch.inference_mode():
        middle = first.model(first.make_step(rows))
        step = last.make_step(rows)
        hidden, residual = last.model(step, *middle)
        logits = last.model.logits(hidden, residual)
    torch.testing.assert_close(logits, whole.step(rows))


def test_build_layer_wraps_every_block(tmp_path: Path) -> None:
    seen: list[str] = []

    class Probe:
        @staticmethod
        @hookimpl
        def build_layer(layer: Any, info: Any) -> Any:
            seen.append(info.name)

    registry = registry_for_tests()
    registry.add(PluginInfo("probe", "probe", "1", "probe"), lambda info: Probe)
    small_model("LlamaForCausalLM").save_pretrained(tmp_path)
    LoadedModel(tmp_path, registry=registry)
    assert seen == ["layers.0", "layers.1", "layers.2"]


WRAPPING = """
import torch
from llmcore.api import hookimpl


class Scaled(torch.nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner
        self.factor = torch.nn.Parameter(torch.ones(()))

    def forward(self, x, step):
        hidden, residual = self.inner(x, step)
        return hidden * self.factor, residual


@hookimpl
def build_layer(layer, info):
    return Scaled(Scaled(layer)) if info.index != 1 else None
"""


def test_weights_find_a_block_that_a_plugin_wrapped(tmp_path: Path) -> None:
    path = tmp_path / "wrapping.py"
    path.write_text(WRAPPING)
    model = tmp_path / "model"
    small_model("LlamaForCausalLM").save_pretrained(model)
    rows = [Row(0, (5, 6, 7, 8), 0, 4)]
    for dummy in (False, True):
        plain = LoadedModel(model, dummy=dummy)
        wrapped = LoadedModel(model, dummy=dummy, registry=registry_of("llama", str(path)))
        assert wrapped.model.wrapped == {"layers.0": "layers.0.inner.inner", "layers.2": "layers.2.inner.inner"}
        assert torch.equal(wrapped.step(rows), plain.step(rows))


INSIDE = """
import torch
from llmcore.api import hookimpl


class LowRank(torch.nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner
        self.weight = torch.nn.Parameter(torch.zeros(72, 2))

    def forward(self, x, step):
        return self.inner(x, step)


@hookimpl
def build_layer(layer, info):
    if info.index == 2:
        return None
    layer.mlp.down_proj = LowRank(layer.mlp.down_proj)
    layer.self_attn.qkv_proj = LowRank(layer.self_attn.qkv_proj)
    layer.self_attn = LowRank(layer.self_attn)
    return LowRank(layer) if info.index else layer
"""


def test_weights_find_the_parts_of_a_block_that_a_plugin_wrapped(tmp_path: Path) -> None:
    """Its own parameters may have the names of those inside."""
    path = tmp_path / "wrapping.py"
    path.write_text(INSIDE)
    model = tmp_path / "model"
    small_model("LlamaForCausalLM").save_pretrained(model)
    rows = [Row(0, (5, 6, 7, 8), 0, 4)]
    plain = LoadedModel(model)
    wrapped = LoadedModel(model, registry=registry_of("llama", str(path)))
    assert wrapped.model.wrapped == {
        "layers.0.self_attn": "layers.0.self_attn.inner",
        "layers.0.self_attn.qkv_proj": "layers.0.self_attn.inner.qkv_proj.inner",
        "layers.0.mlp.down_proj": "layers.0.mlp.down_proj.inner",
        "layers.1": "layers.1.inner",
        "layers.1.self_attn": "layers.1.inner.self_attn.inner",
        "layers.1.self_attn.qkv_proj": "layers.1.inner.self_attn.inner.qkv_proj.inner",
        "layers.1.mlp.down_proj": "layers.1.inner.mlp.down_proj.inner",
    }
    assert torch.equal(wrapped.step(rows), plain.step(rows))


def test_after_the_last_attention_only_sampled_tokens_matter(tmp_path: Path) -> None:
    small_model("LlamaForCausalLM").save_pretrained(tmp_path)
    loaded = LoadedModel(tmp_path)
    rows = [Row(0, (5, 6, 7, 8, 9, 10, 11), 0, 7), Row(1, (3, 4), 0, 2)]
    fed: list[int] = []
    loaded.model.layers["2"].mlp.register_forward_pre_hook(lambda module, given: fed.append(len(given[0])))
    halves = loaded.step(rows)
    # a block that some plugin has wrapped need not have halves
    loaded.model._blocks = (*loaded.model._blocks[:-1], Whole(loaded.model._blocks[-1]))
    torch.testing.assert_close(loaded.step(rows), halves)
    assert fed == [2, 9]
    with torch.inference_mode():
        hidden, _ = loaded.model(replace(loaded.make_step(rows), sampled=None))
    assert len(hidden) == 9


class Whole(torch.nn.Module):
    """Calls a block as a whole."""

    def __init__(self, block: torch.nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Any, step: Any) -> Any:
        return self.block(x, step)
