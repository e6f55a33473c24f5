"""attn.gqa.prefill's flash kernel against the op's reference: lengths, granules, masks, odd sizes, strided inputs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from llmcore.api.models import AttnSpec
from llmcore.api.protocols import AttnLimits, AttnRows
from llmcore.api.specs import DeviceInfo, OpContext
from llmcore.ops import attn_gqa_prefill
from llmcore.ops.attention import shape_of
from llmcore_devtools.kernels.attention_cases import AttnCase, Uploads, case
from llmcore_devtools.kernels.compare import check
from llmcore_triton.attention import prefill
from llmcore_triton.attention.prefill import tiles_of

H200 = DeviceInfo("cuda", "NVIDIA H200", capability=90, processors=132)
TILES = {"block_m": 32, "block_n": 16, "warps": 4, "stages": 1, "pack": True, "tma": True, "small": False}

SPECS = {
    "groups of 3": AttnSpec(heads=6, kv_heads=2, key_size=16, value_size=16, scale=0.25),
    "groups of 7": AttnSpec(heads=7, kv_heads=1, key_size=16, value_size=16, scale=0.3),
    "no groups": AttnSpec(heads=2, kv_heads=2, key_size=32, value_size=32, scale=0.2),
    "heads of 80": AttnSpec(heads=4, kv_heads=1, key_size=80, value_size=80, scale=0.11),
    "short values": AttnSpec(heads=2, kv_heads=2, key_size=48, value_size=32, scale=0.15),
    "window": AttnSpec(heads=4, kv_heads=1, key_size=16, value_size=16, scale=0.25, window=21),
    "soft cap": AttnSpec(heads=4, kv_heads=2, key_size=16, value_size=16, scale=0.4, soft_cap=1.5),
    "full": AttnSpec(heads=4, kv_heads=2, key_size=16, value_size=16, scale=0.25, mask="full"),
}
LENGTHS = (((37, 1, 16), (37, 40, 16)), ((33, 5), (52, 76)), ((16,), (32,)))
"""Prompts longer than a tile; prefixes that end inside a block, at its border, and before a row of one token."""


def context(spec: AttnSpec, dtype: str = "f32", granule: int = 1) -> OpContext:
    fixed = OpContext(op="attn.gqa.prefill", device=H200, dtype=dtype, layout="token", granule=granule, bucket=4)
    return replace(fixed, shape=shape_of(spec))


class Lengths:
    """The op with cases of these lengths for samples, its inputs strided as in a layer."""

    TOLERANCE = attn_gqa_prefill.TOLERANCE

    def __init__(self, *lengths: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
        self.lengths = lengths

    def samples(self, where: OpContext) -> Iterator[tuple[AttnCase]]:
        for seed, (n_query, kv_len) in enumerate(self.lengths):
            yield (in_one_tensor(case(where, n_query, kv_len, seed=seed + 50)),)


def in_one_tensor(given: AttnCase) -> AttnCase:
    """q, k_new and v_new as slices of what one projection wrote: their rows lie far apart."""
    parts = [given.q, given.k_new, given.v_new]
    joined = torch.cat([part.flatten(1) for part in parts], 1)
    ends = np.cumsum([part[0].numel() for part in parts])
    views = [
        joined[:, end - part[0].numel() : end].view(part.shape) for part, end in zip(parts, ends.tolist(), strict=True)
    ]
    given.q, given.k_new, given.v_new = views
    return given


def answer(kernel: prefill.Prefill, given: AttnCase) -> torch.Tensor:
    meta = dict(given.meta)
    kernel.workspace(AttnLimits(rows=8, tokens=1024, kv_len=1024))
    assert kernel.plan(given.rows, Uploads(meta)) == ""
    return kernel.run(given.q, given.k_new, given.v_new, given.kv, meta, given.out())


@pytest.mark.parametrize("granule", [1, 4])
@pytest.mark.parametrize("dtype", ["f32", "f16"])
def test_samples(dtype: str, granule: int) -> None:
    where = context(SPECS["groups of 3"], dtype, granule)
    assert check(attn_gqa_prefill, prefill.make(where), where) > 0


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@pytest.mark.parametrize(("dtype", "granule"), [("f32", 4), ("f16", 1)])
def test_tiles(spec: AttnSpec, dtype: str, granule: int) -> None:
    where = context(spec, dtype, granule)
    assert check(Lengths(*LENGTHS), prefill.make_with(where, TILES), where) == len(LENGTHS)


@pytest.mark.parametrize("change", [{"pack": False}, {"tma": False}, {"small": True}, {"block_n": 64}], ids=str)
def test_launches(change: dict[str, object]) -> None:
    where = context(AttnSpec(heads=4, kv_heads=1, key_size=16, value_size=16, scale=0.25), "f16")
    assert check(Lengths(LENGTHS[0]), prefill.make_with(where, {**TILES, **change}), where) == 1


@pytest.mark.parametrize("dtype", ["f32", "f16"])
def test_inputs_in_one_tensor(dtype: str) -> None:
    """As the layer passes them; new keys that TMA cannot address are read without it."""
    where = context(SPECS["groups of 7"], dtype)
    kernel = prefill.make_with(where, TILES)
    given = in_one_tensor(case(where, *LENGTHS[1]))
    assert not given.k_new.is_contiguous()
    taken = [box is not None for box in kernel._boxes(given.k_new, given.v_new, 16)]
    assert taken == [dtype != "f32"] * 2
    expected, _ = given.expected()
    torch.testing.assert_close(answer(kernel, given).float(), expected, atol=5e-3, rtol=0)
    joined = torch.cat([given.q.flatten(1), given.k_new.flatten(1), given.v_new.flatten(1), given.q[:, 0, :3]], 1)
    given.k_new = joined[:, 7 * 16 : 8 * 16].view(given.k_new.shape)
    given.v_new = joined[:, 8 * 16 : 9 * 16].view(given.v_new.shape)
    assert kernel._boxes(given.k_new, given.v_new, 16) == (None, None)
    torch.testing.assert_close(answer(kernel, given).float(), expected, atol=5e-3, rtol=0)


@pytest.mark.parametrize("window", [None, 21])
def test_any_chunking_gives_the_same_bits(window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt whole and beside others, and its last tokens over the rest as a cached prefix.

    NumPy's products, on which the interpreter builds, round a row by its place in the tile; the matrix units do not.
    """

    def matmul(a: np.ndarray, b: np.ndarray, dtype: type) -> np.ndarray:
        return (a.astype(dtype)[:, :, None] * b.astype(dtype)[None]).sum(1)

    monkeypatch.setattr(np, "matmul", matmul)
    spec = AttnSpec(heads=3, kv_heads=1, key_size=16, value_size=16, scale=0.25, window=window)
    where = context(spec, "f16")
    kernel = prefill.make_with(where, TILES)
    whole = case(where, (90, 20), (90, 33))
    expected = answer(kernel, whole)[:90]
    for n in (1, 43, 58):
        last = slice(90 - n, 90)
        chunk = replace(whole, q=whole.q[last], k_new=whole.k_new[last], v_new=whole.v_new[last])
        chunk.meta = {"table": whole.meta["table"], "request": whole.meta["request"][:1]}
        chunk.meta |= {"q_start": torch.tensor([0, n]).int(), "kv_len": torch.tensor([90]).int()}
        chunk.rows = AttnRows(n_query=np.array([n], np.int32), kv_len=np.array([90], np.int32))
        assert torch.equal(answer(kernel, chunk), expected[last]), n


def test_another_rows_nan_stays_there() -> None:
    where = context(SPECS["groups of 3"], "f16")
    given = case(where, (33, 20), (40, 20))
    before, _ = given.expected()
    given.q[33:], given.k_new[33:], given.v_new[33:] = torch.nan, torch.nan, torch.nan
    got = answer(prefill.make_with(where, TILES), given)
    torch.testing.assert_close(got[:33].float(), before[:33], atol=5e-3, rtol=0)
    assert got[33:].isnan().all()


def test_true_lengths_are_the_devices() -> None:
    """The host's lengths are upper bounds."""
    where = context(SPECS["groups of 3"])
    given = case(where, (20, 3), (45, 30))
    expected, _ = given.expected()
    given.rows = AttnRows(n_query=given.rows.n_query, kv_len=given.rows.kv_len + 7)
    torch.testing.assert_close(answer(prefill.make_with(where, TILES), given), expected)


def test_short_steps_get_small_tiles() -> None:
    spec = AttnSpec(heads=32, kv_heads=8, key_size=128, value_size=128, scale=0.1)
    kernel = prefill.make_with(context(spec, "f16"), {**TILES, "block_m": 128, "small": True})
    for n_query, name in ((64, "tiles64"), (4096, "tiles128")):
        meta: dict[str, torch.Tensor] = {"table": torch.empty(0)}
        kernel.plan(AttnRows(n_query=np.array([n_query], np.int32), kv_len=np.array([5000], np.int32)), Uploads(meta))
        assert name in meta


def test_longest_tiles_first() -> None:
    rows = AttnRows(n_query=np.array([70, 1, 0, 32], np.int32), kv_len=np.array([70, 500, 0, 60], np.int32))
    assert tiles_of(rows, 32).reshape(-1, 2).tolist() == [[1, 0], [0, 2], [0, 1], [3, 0], [0, 0]]
    assert tiles_of(rows, 32, window=8).reshape(-1, 2)[:, 0].tolist().count(0) == 3
