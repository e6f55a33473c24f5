"""Counted slots: allocation, holders, and the invariant after every call."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llmcore.kv.slots import SlotPool


def test_counts_follow_requests_and_cache() -> None:
    pool = SlotPool(8)
    mine = pool.alloc(3)
    assert (pool.live, pool.cached, pool.free) == (3, 0, 5)
    pool.hold(mine[:2])
    pool.keep(mine)
    pool.drop(mine)
    assert (pool.live, pool.cached, pool.free) == (2, 1, 5)
    pool.drop(mine[:2])
    assert (pool.live, pool.cached, pool.free) == (0, 3, 5)
    pool.forget(mine[1:])
    assert (pool.live, pool.cached, pool.free) == (0, 1, 7)
    pool.hold(mine[:1])
    pool.forget(mine[:1])
    assert (pool.live, pool.cached, pool.free) == (1, 0, 7)
    pool.check()


def test_distinct_granules_are_named_once() -> None:
    pool = SlotPool(4)
    assert pool.distinct(np.array([3, 0, 2], np.int32))
    assert pool.distinct(np.array([3, 0, 2, 1], np.int32))
    assert not pool.distinct(np.array([3, 0, 3], np.int32))
    assert not pool.distinct(np.array([0, 1, 2, 3, 0], np.int32)), "more granules than the pool has"


@pytest.mark.parametrize("granule", [1, 2, 16, 32])
def test_every_granule_can_be_had_exactly_once(granule: int) -> None:
    pool = SlotPool(37, granule)
    first = pool.alloc(5)
    everything = np.concatenate([first, pool.alloc(32)])
    assert sorted(everything.tolist()) == list(range(37))
    with pytest.raises(ValueError, match="1 granules asked for, 0 free"):
        pool.alloc(1)
    pool.check()


def test_runs_are_neighbours_and_survive_fragmentation() -> None:
    pool = SlotPool(16 * 8)
    held = pool.alloc(pool.total)
    pool.drop(held[::2])
    assert not len(pool.alloc_runs(4)), "no run is whole while every other granule is held"
    pool.drop(held[1::2][:16])
    runs = pool.alloc_runs(4)
    assert runs.shape == (2, 16)
    assert (np.diff(runs, axis=1) == 1).all()
    pool.check()


def test_loose_granules_come_from_broken_blocks_first() -> None:
    pool = SlotPool(16 * 4)
    pool.alloc(3)
    pool.alloc(5)
    assert len(pool.alloc_runs(4)) == 3


def test_counting_anew_finds_a_wrong_count() -> None:
    pool = SlotPool(4)
    pool.alloc(2)
    pool.holders[np.flatnonzero(pool.holders == 0)[0]] = 1
    with pytest.raises(AssertionError, match="disagree"):
        pool.check()


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.data(), st.integers(1, 70), st.sampled_from([1, 2, 16]))
def test_any_sequence_of_calls_keeps_the_invariant(data: st.DataObject, total: int, granule: int) -> None:
    pool = SlotPool(total, granule)
    rows: list[np.ndarray] = []
    kept: list[np.ndarray] = []
    for _ in range(data.draw(st.integers(1, 25))):
        action = data.draw(st.sampled_from(["alloc", "run", "drop", "fork", "keep", "forget"]))
        if action == "alloc":
            rows.append(pool.alloc(data.draw(st.integers(0, pool.free))))
        elif action == "run":
            rows.extend(pool.alloc_runs(data.draw(st.integers(0, 3))))
        elif action == "drop" and rows:
            pool.drop(rows.pop(data.draw(st.integers(0, len(rows) - 1))))
        elif action == "fork" and rows:
            rows.append(data.draw(st.sampled_from(rows)))
            pool.hold(rows[-1])
        elif action == "keep" and rows:
            fresh = data.draw(st.sampled_from(rows))
            kept.append(fresh[~pool.kept[fresh]])
            pool.keep(kept[-1])
        elif action == "forget" and kept:
            pool.forget(kept.pop())
        pool.check()
    expected = np.zeros(total, np.int32)
    for row in rows:
        expected[row] += 1
    assert (pool.holders == expected).all()


def test_what_is_not_there_cannot_be_had() -> None:
    with pytest.raises(ValueError, match="at least one granule of one token, not 0 of 1"):
        SlotPool(0)
    pool = SlotPool(3)
    pool.alloc(2)
    with pytest.raises(ValueError, match="2 granules asked for, 1 free"):
        pool.alloc(2)
    assert (pool.live, pool.free) == (2, 1)
