"""MLA as a layer: both ways to compute it, pieces of a cached prefix, what bounds its room, ranks that share it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from llmcore.api import KernelSpec, OpContext, PluginInfo, WeightMap, hookimpl
from llmcore.api.errors import ConfigError
from llmcore.api.models import KVGroupSpec, ModelConfig
from llmcore.api.protocols import AttnLimits, AttnRows
from llmcore.api.specs import DeviceInfo, bucket_of
from llmcore.layers import Build, KVStep, Mesh, Partial, Rope, RopeConfig, Step, create_linears
from llmcore.registry.modes import Pins
from llmcore.registry.registry import Registry
from llmcore.weights.load import finish, load_weights
from llmcore_deepseek import latent
from llmcore_deepseek.latent import LatentSizes, Room
from llmcore_deepseek.mla import MLA, MLA_FUSE, LatentSpec
from llmcore_devtools import registry_of
from llmcore_devtools.kernels.attention_cases import Uploads
from llmcore_devtools.loaded_model import registry_for_tests
from torch import nn

from tests.core.weights.test_load import Held

HIDDEN, REQUESTS, TOKENS = 24, 6, 128
SPEC = LatentSpec(heads=6, plain=6, rotated=4, value=5, latent=10, scale=0.3)
CONFIG = ModelConfig(
    architecture="Test",
    vocab_size=10,
    hidden_size=HIDDEN,
    num_layers=1,
    max_position=TOKENS,
    dtype="f32",
    kv_groups=(KVGroupSpec(name="all", layers=(0,), kv_heads=1, key_size=14, value_size=10, layout="mla-latent"),),
)


@dataclass
class Row:
    """New tokens after `start` cached ones. `late`: tokens fewer than the host counts with."""

    start: int
    count: int
    late: int = 0


def make_build(granule: int = 1, registry: Registry | None = None, kind: type[Build] = Build, **more: Any) -> Build:
    return kind(
        registry=registry or registry_of("ops", "deepseek"),
        config=CONFIG,
        device=DeviceInfo("cpu"),
        torch_device=torch.device("cpu"),
        granules={"all": granule},
        **more,
    )


def make_layer(build: Build, spec: LatentSpec = SPEC) -> MLA:
    rope = Rope(build, RopeConfig(rotated=spec.rotated, original=TOKENS))
    layer = MLA(build, HIDDEN, spec, group="all", index=0, rope=rope)
    create_linears(layer)
    return layer


def drawn(layer: MLA, seed: int = 0) -> MLA:
    """With random weights, before the loader's last step."""
    for parameter in layer.parameters():
        parameter.data.normal_(0, 0.3, generator=torch.Generator().manual_seed(parameter.numel() + seed))
    return layer


class Session:
    """A layer over its pool: slots in a scattered order, what is not written full of NaN."""

    def __init__(self, layer: MLA, build: Build) -> None:
        self.layer, self.build = layer, build
        granule = build.layout("all").granule
        count = REQUESTS * TOKENS // granule
        order = np.random.default_rng(1).permutation(count).astype(np.int32)
        self.table = torch.from_numpy(order.reshape(REQUESTS, -1))
        (self.pool,) = build.layout("all").layer_tensors(count, torch.device("cpu"))
        self.pool.fill_(torch.nan)
        self.granule = granule

    def step(self, rows: Sequence[Row], n_decode: int = 0, mixed: bool = False) -> tuple[Step, list[str]]:
        """Of the first requests, and the kernels' keys."""
        counts = np.array([row.count for row in rows], np.int32)
        true = np.array([row.start + row.count for row in rows], np.int32)
        host = true + np.array([row.late for row in rows], np.int32)
        owner = torch.arange(len(rows)).repeat_interleave(torch.from_numpy(counts).long())
        at = torch.cat([torch.arange(row.start, row.start + row.count) for row in rows])
        slots = self.table[owner, at // self.granule].long() * self.granule + at % self.granule
        bucket, kernels = bucket_of(int(counts.sum())), self.build.attention_kernels["all"]
        parts: list[tuple[Any, slice]] = [
            (kernels.decode[bucket], slice(0, n_decode)),
            (kernels.prefill[bucket], slice(n_decode, None)),
        ]
        parts = [(kernels.mixed[bucket], slice(0, None))] if mixed else parts
        metas, keys = [], []
        for kernel, part in parts:
            meta = {
                "table": self.table,
                "request": torch.arange(len(rows), dtype=torch.int32)[part],
                "q_start": torch.from_numpy(np.cumsum([0, *counts[part]], dtype=np.int32)),
                "kv_len": torch.from_numpy(true[part]),
            }
            if len(counts[part]):
                keys.append(kernel.plan(AttnRows(n_query=counts[part], kv_len=host[part]), Uploads(meta)))
            metas.append(meta)
        state = KVStep({0: (self.pool,)}, slots, *((metas[0], metas[-1]) if not mixed else ({}, {}, metas[0])))
        every = at.int().unsqueeze(0)
        return Step(bucket, n_decode, at, every, every[0], None, {"all": state}), keys

    def run(self, x: Sequence[torch.Tensor], rows: Sequence[Row], n_decode: int = 0, mixed: bool = False) -> Any:
        """`x` [tokens, hidden] of each request; the outputs of each row."""
        step, _ = self.step(rows, n_decode, mixed)
        now = torch.cat([given[row.start : row.start + row.count] for given, row in zip(x, rows, strict=False)])
        y = self.layer(now, step)
        return (y.sum(step) if isinstance(y, Partial) else y).split([row.count for row in rows])


def plain(layer: MLA, x: torch.Tensor) -> torch.Tensor:
    """A whole sequence, head by head, from the weights as a checkpoint has them."""
    spec = layer.spec
    joined, up = layer.q_kv_a_proj.weight, layer.kv_b_proj.weight
    border = len(joined) - spec.latent - spec.rotated
    q, row = x @ joined[:border].T, x @ joined[border:].T  # type: ignore[operator, index]

    def norm(given: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return given * (given.square().mean(-1, keepdim=True) + spec.eps).rsqrt() * weight

    if layer.q_a_layernorm is not None and layer.q_b_proj is not None:
        q = norm(q, layer.q_a_layernorm.weight) @ layer.q_b_proj.weight.T  # type: ignore[operator]
    latents = norm(row[:, : spec.latent], layer.kv_a_layernorm.weight)
    both = (latents @ up.T).view(len(x), spec.heads, -1)  # type: ignore[operator]
    angles = torch.arange(len(x))[:, None] / 10000.0 ** (torch.arange(0, spec.rotated, 2) / spec.rotated)

    def turned(given: torch.Tensor) -> torch.Tensor:
        if spec.interleaved:
            pairs = torch.view_as_complex(given.reshape(len(x), -1, 2).contiguous())
        else:
            pairs = torch.complex(*given.chunk(2, -1))
        pairs = pairs * torch.polar(torch.ones_like(angles), angles)
        return torch.cat((pairs.real, pairs.imag), -1)

    key, out = turned(row[:, spec.latent :]), []
    for head, query in enumerate(q.view(len(x), spec.heads, -1).unbind(1)):
        mine = torch.cat((query[:, : spec.plain], turned(query[:, spec.plain :])), -1)
        keys = torch.cat((both[:, head, : spec.plain], key), -1)
        scores = (mine @ keys.T * spec.scale).masked_fill(torch.ones(len(x), len(x)).triu(1).bool(), -torch.inf)
        out.append(scores.softmax(-1) @ both[:, head, spec.plain :])
    return torch.cat(out, -1) @ layer.o_proj.weight.T  # type: ignore[operator, no-any-return]


def inputs(lengths: Sequence[int]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(length, HIDDEN, generator=generator) for length in lengths]


ROWS = [Row(0, 3), Row(40, 9), Row(17, 1), Row(5, 30), Row(0, 12), Row(60, 2)]


@pytest.mark.parametrize("more", [{}, {"q_rank": 8}, {"q_rank": 8, "interleaved": True}, {"interleaved": True}])
@pytest.mark.parametrize(("expanded", "piece"), [(False, 1), (True, 1), (True, 7), (True, 64), (True, 8192)])
def test_prefill(more: dict[str, Any], expanded: bool, piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Absorbed and expanded, over pieces of one token and of everything, both are the plain computation."""
    monkeypatch.setattr(latent, "PREFIX_TOKENS", piece)
    monkeypatch.setattr(LatentSizes, "costs", lambda *rows: (1, 0) if expanded else (0, 1))
    build = make_build(granule=4 if piece == 7 else 1)
    layer = drawn(make_layer(build, replace(SPEC, **more)))
    x = inputs([row.start + row.count for row in ROWS])
    want = [plain(layer, given)[row.start :] for given, row in zip(x, ROWS, strict=True)]
    finish(layer)
    session = Session(layer, build)
    session.run(x, [Row(0, row.start) for row in ROWS])
    # rows may be shorter than the host thinks
    for late in (0, 3):
        got = session.run(x, [replace(row, late=late * (row.start > 0)) for row in ROWS])
        for ours, theirs in zip(got, want, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("expanded", [False, True])
def test_rows_that_decode_beside_others(mixed: bool, expanded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LatentSizes, "costs", lambda *rows: (1, 0) if expanded else (0, 1))
    build = make_build(granule=4)
    layer = drawn(make_layer(build))
    rows = [Row(30, 1), Row(7, 1), Row(20, 11), Row(0, 2)]
    x = inputs([row.start + row.count for row in rows])
    want = [plain(layer, given)[row.start :] for given, row in zip(x, rows, strict=True)]
    finish(layer)
    session = Session(layer, build)
    session.run(x, [Row(0, row.start) for row in rows])
    for some, n_decode in ((rows, 2), (rows[:2], 2)):
        for ours, theirs in zip(session.run(x, some, n_decode, mixed), want, strict=False):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_what_is_cheaper_is_chosen_for_every_step() -> None:
    """A step that is expanded is never captured; an absorbed one as its kernel says."""
    build = make_build()
    session = Session(make_layer(build), build)
    sizes = session.layer.sizes
    assert sizes == LatentSizes(heads=6, plain=6, rotated=4, value=5, latent=10)
    # per prefix token 110 more for its keys and values, per score 9 fewer
    for new, expanded in ((11, False), (12, True)):
        step, keys = session.step([Row(60, new)])
        assert keys == ["" if expanded else "any"]
        assert ("segments" in step.kv["all"].prefill) is expanded
    assert session.step([Row(0, 1)])[1] == [""]
    assert session.step([Row(60, 13), Row(110, 1)])[1] == ["any"]


def test_costs() -> None:
    sizes = LatentSizes(heads=128, plain=128, rotated=64, value=128, latent=512)
    new, kv_len = np.array([100, 1], np.int32), np.array([1100, 5], np.int32)
    scores = 100 * 1000 + 100 * 100 // 2 + 1 * 4
    assert sizes.costs(AttnRows(n_query=new, kv_len=kv_len)) == (
        101 * 512 * 256 + scores * (512 + 64 + 512),
        (101 + 1000 + 4) * 512 * 256 + scores * (128 + 64 + 128),
    )


def test_a_deterministic_step_is_always_absorbed() -> None:
    """Which way is cheaper depends on what else is in the batch."""

    class Whatever(Build):
        """Takes kernels whose results depend on the batch: others are not for this device."""

        def _context(self, *given: Any) -> OpContext:
            return replace(super()._context(*given), deterministic=False)

    build = make_build(deterministic=True, kind=Whatever)
    session = Session(make_layer(build), build)
    assert session.step([Row(0, 30)])[1] == ["any"]
    for kernel in build.attention_kernels["all"].prefill:
        kernel.workspace(AttnLimits(rows=8, tokens=15, kv_len=TOKENS))
    assert session.step([Row(0, 30)])[1] == ["any"]


@pytest.mark.parametrize("most", [1, 5, 16, 1000])
def test_pieces_have_every_cached_token_once(most: int) -> None:
    start, count = [0, 7, 0, 31, 2, 0], [4, 1, 2, 9, 3, 1]
    rows = AttnRows(n_query=np.array(count, np.int32), kv_len=np.array(start, np.int32) + np.array(count, np.int32))
    cuts, segments = latent.cut(rows, most)
    low, tokens = segments.reshape(2, -1)
    rows_of = [row for piece in cuts for row in range(piece.first, piece.last)]
    assert [(row, low[i] + t) for i, row in enumerate(rows_of) for t in range(tokens[i])] == [
        (row, t) for row, n in enumerate(start) for t in range(n)
    ]
    assert max(piece.tokens for piece in cuts) <= min(piece.tokens for piece in cuts) + 1
    for piece in cuts:
        own = piece.segments
        assert own.stop - own.start == piece.last - piece.first
        assert sum(tokens[own]) == piece.tokens <= most
        assert piece.longest == (max(count[piece.first : piece.last]), max(tokens[own]))
        assert piece.queries == slice(sum(count[: piece.first]), sum(count[: piece.last]))
    assert latent.cut(AttnRows(n_query=np.array([3], np.int32), kv_len=np.array([3], np.int32)), most)[0] == []


@pytest.mark.parametrize("heads", [1, 16, 128])
def test_no_step_takes_more_room_than_the_largest_prompt(heads: int) -> None:
    """In elements per head: what is held while a piece is attended to, while parts are joined, and absorbed."""
    n, tokens = LatentSizes(heads=heads, plain=128, rotated=64, value=128, latent=512), 4096
    key, room = n.plain + n.rotated, Room(n)
    assert room.piece(7) == latent.PREFIX_TOKENS
    assert room.absorbed is None
    room.take(tokens)
    room.take(64)
    assert room.most == tokens * (2 * key + n.plain + 2 * n.value)
    for new in (1, 100, 2000, tokens):
        piece = room.piece(new)
        row = (n.latent + n.rotated) / heads
        assert new * (key + 2 * n.value) + piece * (key + n.plain + n.value + row) <= room.most
        assert new * (key + 4 * n.value) <= room.most
        assert piece > 100
    assert room.absorbed is not None
    assert room.absorbed * (key + 2 * n.latent + n.rotated) <= room.most < tokens * (key + 2 * n.latent + n.rotated)


def test_steps_that_would_take_more_room_absorbed_are_expanded() -> None:
    build = make_build()
    session = Session(make_layer(build), build)
    rows = [Row(60, 4)] * 5
    assert session.step(rows)[1] == ["any"]
    for kernel in build.attention_kernels["all"].prefill:
        kernel.workspace(AttnLimits(rows=8, tokens=15, kv_len=TOKENS))
    assert session.step(rows)[1] == [""]
    assert session.step(rows[:2])[1] == ["any"]


def sum_of_ranks(context: OpContext) -> Any:
    """Stands in for the other ranks: the test adds their shares."""
    return lambda y: y


def with_reduce() -> Registry:
    class Plugin:
        @staticmethod
        @hookimpl
        def register_kernels() -> list[KernelSpec]:
            return [KernelSpec(op="comm.all_reduce", name="mine", make=f"{__name__}:sum_of_ranks")]

    registry = registry_for_tests()
    registry.add(PluginInfo("mine", "mine", "1", "mine"), lambda info: Plugin)
    assert not registry.failures
    return registry


@pytest.mark.parametrize("q_rank", [None, 8])
def test_ranks_share_heads_and_have_all_of_the_latent(q_rank: int | None) -> None:
    """Their results add up to those of one rank."""
    spec = replace(SPEC, q_rank=q_rank, interleaved=True)
    one = drawn(make_layer(make_build(), spec))
    border = len(one.q_kv_a_proj.get_parameter("weight")) - 14
    first = "q_proj" if q_rank is None else "q_a_proj"
    joined = one.q_kv_a_proj.get_parameter("weight").detach()
    tensors = {name: value.detach().clone() for name, value in one.named_parameters() if "q_kv_a" not in name}
    tensors |= {f"{first}.weight": joined[:border].clone(), "kv_a_proj_with_mqa.weight": joined[border:].clone()}
    x = inputs([20])
    want = plain(one, x[0])
    total = torch.zeros_like(want)
    for rank in range(3):
        mesh = Mesh({"attn_tp": 3}, {"attn_tp": rank})
        build = make_build(registry=with_reduce(), mesh=mesh)
        layer = make_layer(build, spec)
        whole = nn.Module()
        whole.attn = layer
        held = Held(**{f"attn.{name}": tensor for name, tensor in tensors.items()})
        load_weights(whole, held, WeightMap(fuse=MLA_FUSE), mesh=mesh)
        assert layer.sizes.heads == 2
        total += Session(layer, build).run(x, [Row(0, 20)])[0]
    torch.testing.assert_close(total, want, rtol=1e-4, atol=1e-4)


def test_a_layout_of_keys_and_values_is_refused() -> None:
    build = make_build(registry=registry_of("ops", "deepseek", "layouts"), pins=Pins(layouts={"mla-latent": "token"}))
    with pytest.raises(ConfigError, match="one row per token, not 'token'"):
        make_layer(build)


def test_layers_of_a_group_have_one_size() -> None:
    build = make_build()
    make_layer(build)
    with pytest.raises(ConfigError, match="latent attention of two sizes"):
        make_layer(build, replace(SPEC, value=4))
