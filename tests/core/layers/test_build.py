"""Build: kernels per bucket, composites and their expansion, pins, KV groups, and slices of a decoder."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from built import CONFIG, build
from held import Held
from llmcore.api import AttnSpec, KernelSpec, OpContext, Requires, hookimpl
from llmcore.api.errors import ConfigError, PluginError, ResolveError
from llmcore.api.specs import PluginInfo
from llmcore.layers import InputForm, RMSNorm, Rounded, Rows, packed, packing, tensor_parallel
from llmcore.ops import add_rms_norm
from llmcore.registry.modes import Pins
from llmcore.registry.registry import Registry
from llmcore_devtools.loaded_model import registry_for_tests

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


def test_a_form_is_written_if_an_op_can() -> None:
    """Else the plain op runs, as without a form."""
    made, codes = build(), {"codes": "i8", "group": 0}
    quant, other = (InputForm(suffix=suffix, shape=codes) for suffix in ("quant", "unknown"))
    for form in (None, other):
        assert made.writer("rms_norm", form, size=8) == made.op("rms_norm", size=8)
    x, weight = torch.randn(2, 8), torch.ones(8)
    rows = made.writer("rms_norm", quant, size=8)[1](x, weight, 1e-5)
    assert isinstance(rows, Rounded) and rows.codes.dtype == torch.int8 and rows.scale.shape == (2, 1)
    again, total = made.writer("add_rms_norm", quant, size=8)[1](x, torch.zeros(2, 8), weight, 1e-5)
    assert torch.equal(again.codes, rows.codes) and torch.equal(total, x)


def test_a_kernel_replaces_the_tensors_that_it_packs() -> None:
    class Kernel:
        packing = "turned"

        def pack(self, scale: str | None, codes: str | None, order: str | None) -> tuple[str | None, ...]:
            return f"{scale} turned", f"{codes} turned", order

    class Single:
        packing = "single"

        def pack(self, weight: str) -> str:
            return f"{weight} packed"

    given = {"x": "x", "codes": "codes", "scale": "scale", "bias": None}
    assert packed(Kernel().pack, given) == {**given, "codes": "codes turned", "scale": "scale turned"}
    assert packed(Single().pack, {"x": "x", "weight": "weight"}) == {"x": "x", "weight": "weight packed"}
    assert packing([Kernel(), Single()]) is None and packing([Kernel(), object()]) is None
    assert packing([single := Single(), Single()]) == single.pack


def test_a_layout_of_heads_has_those_of_its_rank() -> None:
    groups = tuple(replace(CONFIG.kv_groups[0], kv_heads=heads) for heads in (4, 1))
    for group, held in zip(groups, (2, 1), strict=True):
        made = build(config=replace(CONFIG, kv_groups=(group,)), mesh=tensor_parallel(1, 2))
        layout = made.layout("all")
        assert layout.group.kv_heads == held and layout.tensors(3, made.torch_device)[0][0].shape == (3, held, 4)
        assert layout.bytes == held * 2 * 4 * 4
    latent = replace(groups[1], layout="mla-latent", key_size=6)
    made = build(config=replace(CONFIG, kv_groups=(latent,)), mesh=tensor_parallel(1, 2))
    assert made.layout("all").group == latent


@pytest.mark.parametrize(("heads", "ranks", "held"), [(4, 2, [[0, 1], [2, 3]]), (2, 4, [[0], [0], [1], [1]])])
def test_a_rank_has_the_fixed_scales_of_its_kv_heads(heads: int, ranks: int, held: list[list[int]]) -> None:
    group = replace(CONFIG.kv_groups[0], kv_heads=heads, layers=(0, 1))
    config, pins = replace(CONFIG, num_layers=2, kv_groups=(group,)), Pins(layouts={"token": "token-fp8"})
    scales = {
        f"model.layers.{layer}.self_attn.{side}_scale": torch.arange(1.0, heads + 1) + 10 * layer + 100 * (side == "v")
        for layer in (0, 1)
        for side in "kv"
    }
    identities = set()
    for rank, mine in enumerate(held):
        made = build(config=config, pins=pins, mesh=tensor_parallel(rank, ranks))
        plain = made.layout("all").identity
        made.calibrate(Held(**scales), {})
        identities |= {made.layout("all").identity}
        assert plain not in identities
        for layer, (*_, k, v) in made.layout("all").tensors(1, made.torch_device).items():
            assert k.tolist() == [1.0 + head + 10 * layer for head in mine]
            assert v.tolist() == [101.0 + head + 10 * layer for head in mine]
    assert len(identities) == 1, "ranks compare what they store"
