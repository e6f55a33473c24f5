"""Checksums of what ranks have alike: each bit counts, padding does not, and a comparison names the first step."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from llmcore.api.errors import LlmcoreError
from llmcore.api.models import KVGroupSpec
from llmcore.layers import KVStep, Step
from llmcore_devtools.bench.replicated import (
    CAPACITY,
    COLUMNS,
    Ledger,
    alone,
    checksum,
    compare,
    real_tokens,
    shared_pools,
)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int32, torch.int64, torch.float8_e4m3fn])
@pytest.mark.parametrize("width", [1, 3, 8])
def test_every_bit_of_a_real_row_counts(dtype: torch.dtype, width: int) -> None:
    draw = torch.Generator().manual_seed(1)
    x = torch.randint(-128, 128, (3, width * dtype.itemsize), dtype=torch.int8, generator=draw).view(dtype)
    real, found = torch.tensor([True, False, True]), set()
    right = int(checksum(x, real))
    for row in range(3):
        for byte in range(width * dtype.itemsize):
            for bit in range(8):
                other = x.clone()
                other.view(torch.uint8)[row, byte] ^= 1 << bit
                found.add(changed := int(checksum(other, real)))
                assert (changed == right) == (row == 1)
    assert len(found) == 1 + 2 * 8 * width * dtype.itemsize, "no two changes have one checksum"
    assert int(checksum(x.view(torch.uint8).flip(0).view(dtype), real)) != right, "rows have an order"
    assert int(checksum(x[:0], real[:0])) == 0


def step(slots: list[int], tokens: list[int]) -> Step:
    """Tokens at these slots of a pool of 5 granules of 4 slots, the last of which is for padding."""
    table = torch.tensor([[0, 1], [2, 3], [4, 0]], dtype=torch.int32)
    kv = KVStep(kv={0: (torch.zeros(20, 1, 2),)}, slots=torch.tensor(slots), decode={"table": table}, prefill={})
    count = len(tokens)
    return Step(
        bucket=0,
        n_decode=count,
        tokens=torch.tensor(tokens),
        positions=torch.arange(count, dtype=torch.int32).unsqueeze(0),
        prompt_len=torch.ones(count, dtype=torch.int32),
        sampled=None,
        kv={"all": kv},
    )


def test_padding_is_the_first_slot_of_the_last_granule() -> None:
    padded = step([0, 15, 16, 16], [5, 6, 7, 8])
    assert real_tokens(padded).tolist() == [True, True, False, False]
    (group,) = padded.kv.values()
    mixed = replace(padded, kv={"all": replace(group, mixed=group.decode, decode={})})
    assert real_tokens(mixed).tolist() == [True, True, False, False]


@pytest.mark.parametrize("slots", [[], [3], [3, 1, 3, 2, 1, 0], [7, 7]])
def test_slots_that_tokens_share(slots: list[int]) -> None:
    assert alone(torch.tensor(slots, dtype=torch.int32)).tolist() == [slots.count(slot) == 1 for slot in slots]


def test_rows_that_are_not_kept_do_not_count(tmp_path: Path) -> None:
    stored, kept = torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([True, False, True])
    for name, row, value in ((os.getpid(), 1, 2.0), (1, 1, 5.0), (2, 2, 5.0)):
        ledger = Ledger()
        ledger.begin(step([0, 1, 2], [5, 6, 7]))
        ledger.add("kv", stored.index_fill(0, torch.tensor([row]), value), kept)
        ledger.save(tmp_path / f"{name}.npz")
    _, compared = compare(tmp_path, 3)
    assert {one.column: one.mismatches for one in compared}["kv"] == 1
    (tmp_path / "2.npz").unlink()
    assert not any(one.mismatches for one in compare(tmp_path, 2)[1])


def written(folder: Path, name: int, *steps: tuple[Step, torch.Tensor]) -> None:
    ledger = Ledger()
    for one, residual in steps:
        ledger.begin(one)
        ledger.choose(torch.tensor([1]))
        ledger.add("residual", residual)
    ledger.save(folder / f"{name}.npz")


def test_a_comparison_counts_steps_and_names_the_first(tmp_path: Path) -> None:
    plain, residual = step([0, 15, 16], [5, 6, 7]), torch.randn(1, 4)
    other, off = step([0, 15, 16], [5, 9, 7]), residual + 1e-6
    padding = step([0, 15, 16], [5, 6, 1])
    written(tmp_path, os.getpid(), *[(plain, residual)] * 4)
    written(tmp_path, 1, (plain, residual), (padding, residual), (other, residual), (plain, off))
    steps, compared = compare(tmp_path, 2)
    assert steps == 4
    assert {one.column: (one.filled, one.mismatches, one.first) for one in compared} == {
        "tokens": (4, 1, 3),
        "lengths": (4, 0, None),
        "router": (0, 0, None),
        "kv": (0, 0, None),
        "residual": (4, 1, 4),
    }


def test_ranks_that_wrote_nothing_or_made_other_steps(tmp_path: Path) -> None:
    plain, residual = step([0, 1], [5, 6]), torch.ones(1, 4)
    written(tmp_path, os.getpid(), (plain, residual))
    with pytest.raises(LlmcoreError, match="1 of 2 ranks wrote checksums"):
        compare(tmp_path, 2)
    written(tmp_path, 1, (plain, residual), (plain, residual))
    with pytest.raises(LlmcoreError, match="different numbers of steps"):
        compare(tmp_path, 2)


def test_steps_beyond_the_table_are_added_to_its_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llmcore_devtools.bench.replicated.CAPACITY", 2)
    plain, residual = step([0, 1], [5, 6]), torch.ones(1, 4)
    for name, last in ((os.getpid(), plain), (1, step([0, 1], [5, 7]))):
        written(tmp_path, name, (plain, residual), (plain, residual), (last, residual))
    with np.load(tmp_path / "1.npz") as file:
        assert file["rows"].shape == (2, len(COLUMNS)) and CAPACITY > 2
    steps, (tokens, *_) = compare(tmp_path, 2)
    assert (steps, tokens.mismatches, tokens.first) == (3, 1, 1)


def test_pools_that_ranks_share_have_all_heads() -> None:
    sizes: dict[str, Any] = {"layers": (0,), "key_size": 2, "value_size": 2}
    latent = KVGroupSpec(name="kv", kv_heads=1, layout="mla-latent", **sizes)
    codes, scales, fixed = torch.zeros(8, 1, 2), torch.zeros(8, 1, 1), torch.ones(1)
    assert len(shared_pools((codes, scales, fixed), latent)) == 2
    assert not shared_pools((codes, scales), KVGroupSpec(name="kv", kv_heads=2, layout="token", **sizes))
