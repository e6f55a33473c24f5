"""Layouts: what is written is read, granules are copied bit for bit, bytes are what is allocated, constants stay."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from built import CONFIG, build
from llmcore.api import AttnSpec, KVLayoutSpec, hookimpl
from llmcore.api.models import KVGroupSpec
from llmcore.api.specs import PluginInfo
from llmcore.layers.layout import KV, TokenLayout
from llmcore.ops import rope, rope_angles
from llmcore.ops.attention import attend
from llmcore.registry.modes import Pins
from llmcore_devtools.loaded_model import registry_for_tests

GROUP = KVGroupSpec(name="all", layers=(0, 3), kv_heads=2, key_size=4, value_size=6)
CPU = torch.device("cpu")


@pytest.mark.parametrize("granule", [1, 4])
def test_token_layout(granule: int) -> None:
    layout = TokenLayout(GROUP, granule, "bf16")
    pools = layout.tensors(5, CPU)
    assert sorted(pools) == [0, 3]
    assert sum(tensor.nbytes for kv in pools.values() for tensor in kv) == 5 * layout.bytes
    k, v = torch.randn(granule, 2, 4).bfloat16(), torch.randn(granule, 2, 6).bfloat16()
    slots = torch.arange(3 * granule, 4 * granule)
    layout.write(pools[3], slots, k, v)
    assert all(torch.equal(*pair) for pair in zip(layout.gather(pools[3], slots), (k, v), strict=True))
    layout.copy(pools[3], torch.tensor([3]), torch.tensor([1]))
    copied = layout.gather(pools[3], torch.arange(granule, 2 * granule))
    assert all(torch.equal(*pair) for pair in zip(copied, (k, v), strict=True))
    layout.scatter(pools[0], slots, *copied)
    assert torch.equal(layout.gather(pools[0], slots)[1], v)


def test_an_unused_pool_takes_no_memory() -> None:
    grown, kept = [], []
    for _ in range(3):  # other tests' threads may still take memory of their own
        before = resident()
        kept.append(pools := TokenLayout(GROUP, 1, "f32").tensors(1_000_000, CPU))
        grown.append(resident() - before)
    # all are kept, so that none can take the place of another
    assert min(grown) < 8 << 20
    assert all(tensor.data_ptr() % 64 == 0 and not tensor[-1].any() for kv in pools.values() for tensor in kv)


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


# --- a layout that rounds --------------------------------------------------------------------------------------------


class Coarse(TokenLayout):
    """Keys and values as multiples of a step, which is a constant of each layer."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.steps = dict.fromkeys(self.group.layers, torch.ones(1))

    def constants(self, layer: int) -> tuple[torch.Tensor, ...]:
        return (self.steps[layer],)

    def write(self, kv: KV, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        for new in (k, v):
            new.copy_((new / kv[2]).round() * kv[2])
        super().write(kv, slots, k, v)


def fill(layout: Coarse, model: Any, checkpoint: Any, options: Any) -> None:
    layout.steps = {layer: torch.tensor([options[checkpoint][model.architecture]]) for layer in layout.group.layers}


class Plugin:
    @staticmethod
    @hookimpl
    def register_kv_layouts() -> list[KVLayoutSpec]:
        return [KVLayoutSpec(name="coarse", make=f"{__name__}:Coarse", calibrate=f"{__name__}:fill")]


def test_constants_follow_the_pool_and_stay_as_they_are() -> None:
    torch.manual_seed(0)
    layout = Coarse(GROUP, 4, "f32")
    layout.steps[3] = torch.tensor([0.5])
    pools = layout.tensors(5, CPU)
    assert [kv[2].item() for kv in pools.values()] == [1.0, 0.5] and len(layout.pool(pools[0])) == 2
    assert sum(part.nbytes for kv in pools.values() for part in layout.pool(kv)) == 5 * layout.bytes
    slots, k, v = torch.tensor([7, 2, 9]), torch.randn(3, 2, 4), torch.randn(3, 2, 6)
    layout.write(pools[3], slots, k, v)
    raw = layout.export(pools[3], slots)
    assert len(raw) == 2 and torch.equal(raw[0], k)
    layout.restore(pools[0], slots.flip(0), raw)
    layout.copy(pools[0], torch.tensor([0, 1]), torch.tensor([4, 3]))
    for part, expected in zip(layout.gather(pools[0], torch.tensor([9, 2, 7, 18])), (k, v), strict=True):
        assert torch.equal(part, expected[[0, 1, 2, 1]])
    assert [kv[2].item() for kv in pools.values()] == [1.0, 0.5]


def test_an_identity_names_the_layout_the_group_and_the_constants() -> None:
    layout, other = Coarse(GROUP, 4, "f32"), Coarse(GROUP, 1, "f32")
    assert layout.identity == other.identity and layout.identity.startswith("token/all/")
    other.steps[3] = torch.tensor([0.5])
    others = [
        other,
        Coarse(GROUP, 4, "f16"),
        Coarse(replace(GROUP, kv_heads=3), 4, "f32"),
        TokenLayout(GROUP, 4, "f32"),
    ]
    assert len({layout.identity, *(one.identity for one in others)}) == 5


def test_a_layout_that_rounds_is_calibrated_written_and_attended() -> None:
    torch.manual_seed(0)
    registry = registry_for_tests()
    registry.add(PluginInfo("coarse", "coarse", "1", "coarse"), lambda info: Plugin)
    made = build(registry, pins=Pins(layouts={"token": "coarse"}))
    made.calibrate("stored", {"stored": {CONFIG.architecture: 0.25}})  # type: ignore[arg-type]
    layout = made.layout("all")
    assert [constant.item() for constant in layout.constants(0)] == [0.25]
    kv = layout.tensors(9, CPU)[0]
    write = made.op(
        "rope_kv_write",
        layout="coarse",
        given={"kv_write": layout.write},
        heads=2,
        kv_heads=1,
        size=4,
        rotated=4,
    )[1]
    qk, v, slots = torch.randn(5, 3, 4), torch.randn(5, 1, 4), torch.tensor([4, 0, 8, 2, 5])
    cos, sin = rope_angles.reference(torch.arange(5, dtype=torch.int32), torch.tensor([1.0, 0.1]), 1.0)
    turned = rope.reference(qk, cos, sin)
    stored = write(qk.clone(), v_new := v.clone(), cos, sin, kv, slots)
    rounded = (turned[:, 2:] * 4).round() / 4, (v * 4).round() / 4
    torch.testing.assert_close(stored, torch.cat((turned[:, :2], rounded[0]), 1), rtol=0, atol=1e-6)
    for left, read, expected in zip((stored[:, 2:], v_new), layout.gather(kv, slots), rounded, strict=True):
        assert torch.equal(left, read) and torch.equal(read, expected)
    spec = AttnSpec(heads=2, kv_heads=1, key_size=4, value_size=4, scale=0.5)
    table = torch.full((1, 9), 7, dtype=torch.int32)
    table[0, :5] = slots
    meta = {"table": table, "request": torch.tensor([0]), "kv_len": torch.tensor([5]), "q_start": torch.tensor([0, 5])}
    out = torch.empty(5, 2, 4)
    made.attention(spec, "all").prefill[1].run(stored[:, :2], stored[:, 2:], v_new, kv, meta, out)
    torch.testing.assert_close(out, attend(turned[:, :2], *rounded, spec)[0], rtol=1e-5, atol=1e-5)
