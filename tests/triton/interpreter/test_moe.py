"""The kernels for mixtures of experts against their ops' references, in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from llmcore.api.specs import DeviceInfo, KernelSpec, OpContext
from llmcore.ops import DTYPES, drawing, moe_combine, moe_dispatch, moe_experts, moe_fused, moe_route
from llmcore.registry.loader import load
from llmcore.registry.resolve import why_not
from llmcore_devtools.kernels.compare import check, compare
from llmcore_devtools.kernels.real_shapes import real_shapes
from llmcore_triton.moe import dispatch, experts, fused, route
from llmcore_triton.specs import rows as specs

# exp overflows for gates far below zero, and means to
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::DeprecationWarning")

CPU = torch.device("cpu")
H200 = DeviceInfo("cuda", "NVIDIA H200", capability=90, processors=132)
MODULES: dict[str, Any] = {
    "moe.route": moe_route,
    "moe.dispatch": moe_dispatch,
    "moe.experts": moe_experts,
    "moe.combine": moe_combine,
    "moe.fused": moe_fused,
}
SMALL = {"experts": 8, "top_k": 2, "normalize": True, "size": 48, "inner": 32}


@pytest.fixture(autouse=True)
def _poisoned() -> Iterator[None]:
    """What a kernel does not write is NaN, or no index that there is."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(before)


def context(op: str, dtype: str = "f32", bucket: int = 0, **shape: Any) -> OpContext:
    return OpContext(op=op, device=H200, dtype=dtype, bucket=bucket, shape=shape)  # type: ignore[arg-type]


def spec_of(op: str) -> KernelSpec:
    return next(spec for spec in specs.kernels() if spec.op == op)


def sample(where: OpContext, tokens: int) -> tuple[Any, ...]:
    """The last of an op's samples of so many tokens: with something to add, or all at the same experts."""
    with drawing(3, CPU, tokens):
        return list(MODULES[where.op].samples(where))[-1]


@pytest.mark.parametrize("dtype", ["f32", "f16"])
@pytest.mark.parametrize("op", ["moe.route", "moe.dispatch", "moe.combine"])
def test_samples(op: str, dtype: str) -> None:
    # split over programs and not
    for number, shape in enumerate(MODULES[op].SHAPES):
        for bucket in ((0, 1), (0, 3))[(number + (dtype == "f16")) % 2]:
            where = context(op, dtype, bucket, **shape)
            assert check(MODULES[op], load(spec_of(op).make)(where), where) > 0


@pytest.mark.parametrize("dtype", ["f32", "f16"])
@pytest.mark.parametrize("shape", moe_experts.SHAPES, ids=str)
def test_samples_of_experts(shape: dict[str, Any], dtype: str) -> None:
    """Tiles of 16 and of LONG pairs; TMA where rows are aligned."""
    for bucket, tokens in ((1, 2), (4, 12)):
        where = context("moe.experts", dtype, bucket, **shape)
        kernel = experts.make(where)
        with drawing(5, CPU, tokens):
            for given in moe_experts.samples(where):
                compare(moe_experts, kernel, where, given, CPU)


@pytest.mark.parametrize(("tokens", "bucket"), [(1, 0), (3, 1), (13, 1)])
@pytest.mark.parametrize("number", range(len(moe_fused.SHAPES)))
def test_samples_of_fused(number: int, tokens: int, bucket: int) -> None:
    where = context("moe.fused", "f16" if (number + tokens) % 2 else "f32", bucket, **moe_fused.SHAPES[number])
    assert why_not(spec_of("moe.fused"), where) is None
    # fewer programs than by default, which the interpreter runs one after the other
    kernel = fused.make_with(where, {"gate_up": [8, 32, 1], "down": [16, 32, 1]} if tokens == 1 else {})
    with drawing(7, CPU, tokens):
        for given in moe_fused.samples(where):
            compare(moe_fused, kernel, where, given, CPU)


@pytest.mark.parametrize(("bucket", "tokens"), [(0, 3), (0, 20), (1, 1), (1, 17)])
def test_any_number_of_tokens(bucket: int, tokens: int) -> None:
    """Whatever bucket a kernel was made for."""
    for op, module, shared in (("moe.fused", fused, 0), ("moe.fused", fused, 24), ("moe.route", route, 0)):
        where = context(op, bucket=bucket, **SMALL, shared=shared)
        compare(MODULES[op], module.make(where), where, sample(where, tokens), CPU)


@pytest.mark.parametrize("tma", [False, True])
def test_long_tiles(tma: bool) -> None:
    """So many pairs for each expert that tiles of the last bucket are the large ones, some of them full."""
    where = context("moe.experts", "f16", 4, experts=3, top_k=2, size=48, inner=40)
    kernel = experts.make_with(where, {"tma": tma})
    compare(moe_experts, kernel, where, sample(where, 140), CPU)


def test_one_token_before_and_after_the_wait() -> None:
    where = context("moe.fused", "f16", **{**SMALL, "inner": 51})
    compare(moe_fused, fused.make(where), where, sample(where, 1), CPU)
    for early in (False, True):
        for shared in (0, 70):
            where = replace(where, shape={**where.shape, "shared": shared})
            config = {"gate_up": [16, 16, 1], "down": [16, 16, 1], "early": early}
            compare(moe_fused, fused.make_with(where, config), where, sample(where, 1), CPU)


def test_what_all_tokens_see_by_tma() -> None:
    where = context("moe.fused", "f16", 1, **{**SMALL, "shared": 80})
    for tma in (False, True):
        compare(moe_fused, fused.make_with(where, {"tma": tma}), where, sample(where, 5), CPU)


def test_pairs_of_many_blocks() -> None:
    where = context("moe.dispatch", bucket=4, experts=7, top_k=3)
    kernel = dispatch.make_with(where, {"num_warps": 4, "block": 64})
    with drawing(1, CPU, 150):
        for given in moe_dispatch.samples(where):
            compare(moe_dispatch, kernel, where, given, CPU)


@pytest.mark.parametrize("op", ["moe.route", "moe.experts"])
def test_deterministic(op: str) -> None:
    """One tile and one order for all buckets."""
    shape = {**SMALL, "bias": True, "scoring": "sigmoid"} if op == "moe.route" else SMALL
    configs = []
    for bucket in (0, 4):
        where = replace(context(op, bucket=bucket, **shape), deterministic=True)
        compare(MODULES[op], load(spec_of(op).make)(where), where, sample(where, 9), CPU)
        module = route if op == "moe.route" else experts
        configs.append(module.default(where))
    assert configs[0] == configs[1] and spec_of(op).batch_invariant


@pytest.mark.parametrize("tokens", [1, 5, 20])
def test_a_row_of_nan_chooses_experts_that_there_are(tokens: int) -> None:
    """And no other row sees it; rows lie apart, with NaN between them. An f32 router beside a half model."""
    where = context("moe.route", "f16", 1, **{**SMALL, "experts": 6, "groups": 2, "top_groups": 1})
    x, weight, bias = sample(where, tokens)
    wide = torch.full((tokens, 80), torch.nan, dtype=DTYPES["f16"])
    wide[:, 8:56] = x
    expected, best = moe_route.make(where)(x, weight, bias)
    kernel = route.make(where)
    for router in (weight, weight.float()):
        weights, chosen = kernel(wide[:, 8:56], router, bias)
        torch.testing.assert_close(weights, expected)
        assert torch.equal(chosen, best)
    wide[0] = torch.nan
    weights, chosen = kernel(wide[:, 8:56], weight, bias)
    assert weights[0].isnan().all() and bool(((chosen >= 0) & (chosen < 6)).all())
    assert len(set(chosen[0].tolist())) == chosen.shape[1]
    torch.testing.assert_close(weights[1:], expected[1:])


def test_what_is_declined() -> None:
    refuses = spec_of("moe.route").refuses
    assert refuses is not None
    for shape in (
        {"experts": 257},
        {"experts": 10, "groups": 4},
        {"experts": 16, "groups": 8, "top_groups": 1, "top_k": 3},
        {"experts": 8, "groups": 8, "top_groups": 2, "group_score": "top2"},
        {"experts": 8, "size": None},
    ):
        assert refuses(context("moe.route", **{**SMALL, **shape}))
    assert all(refuses(context("moe.route", **shape)) is None for shape in real_shapes("moe.route"))


@pytest.mark.parametrize("capability", [80, 86, 90, 120])
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_every_configuration_fits_into_shared_memory(dtype: str, capability: int) -> None:
    limit = {80: 163, 86: 99, 90: 227, 120: 99}[capability] * 1024
    for shape in real_shapes("moe.experts"):
        for bucket in range(5):
            where = replace(
                context("moe.experts", dtype, bucket, **shape), device=replace(H200, capability=capability)
            )
            configs = list(experts.candidates(where))
            assert configs[0] == experts.default(where) and len(configs) <= 36
            for config in configs:
                for name in ("gate_up", "down"):
                    tile = experts.Tile(*config[name])
                    rows = tile.block_m + (1 + (name == "gate_up")) * tile.block_n
                    stages = min(tile.stages, experts.most_stages(where, tile, name == "gate_up"))
                    assert stages * rows * tile.block_k * DTYPES[dtype].itemsize <= limit
