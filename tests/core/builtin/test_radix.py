"""The radix tree against a dictionary of prefixes, its order of eviction, and what a split leaves behind."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llmcore.api.sched import Int32, Int64
from llmcore.builtin.radix import NoCache, RadixCache


def ids(*tokens: int) -> Int64:
    return np.array(tokens, np.int64)


def slots(*granules: int) -> Int32:
    return np.array(granules, np.int32)


def nobody(granules: Int32) -> np.ndarray:
    return np.zeros(granules.size, np.bool_)


def test_a_prefix_is_found_and_inserted_once() -> None:
    tree = RadixCache()
    assert tree.insert(b"", ids(1, 2, 3), slots(10, 11, 12)).tolist() == [10, 11, 12]
    assert tree.match(b"", ids(1, 2, 9)).tolist() == [10, 11]
    assert tree.insert(b"", ids(1, 2, 4, 5), slots(20, 21, 22, 23)).tolist() == [22, 23]
    assert tree.match(b"", ids(1, 2, 4, 5, 6)).tolist() == [10, 11, 22, 23]
    assert tree.insert(b"", ids(1, 2), slots(30, 31)).tolist() == []
    assert tree.stats() == {"granules": 5, "nodes": 3}


def test_salts_do_not_meet() -> None:
    tree = RadixCache()
    tree.insert(b"a", ids(1, 2), slots(0, 1))
    assert tree.match(b"b", ids(1, 2)).size == 0
    assert tree.match(b"a", ids(1, 2)).tolist() == [0, 1]


def test_only_whole_granules_count() -> None:
    tree = RadixCache(4)
    tree.insert(b"", ids(*range(9)), slots(5, 6))
    assert tree.match(b"", ids(*range(7))).tolist() == [5]
    assert tree.match(b"", ids(0, 1, 2, 3, 4, 5, 6, 99)).tolist() == [5]
    assert tree.insert(b"", ids(0, 1, 2, 3, 4, 5, 6, 99), slots(7, 8)).tolist() == [8]
    assert tree.match(b"", ids(0, 1, 2)).size == 0


def test_eviction_takes_the_oldest_leaves_from_their_ends() -> None:
    tree = RadixCache()
    tree.insert(b"", ids(1, 2, 3), slots(1, 2, 3))
    tree.insert(b"", ids(7, 8), slots(7, 8))
    tree.match(b"", ids(1, 2, 3))
    assert tree.evict(1, nobody).tolist() == [8]
    assert tree.evict(2, nobody).tolist() == [7, 3]
    assert tree.match(b"", ids(1, 2, 3)).tolist() == [1, 2]
    assert sorted(tree.evict(9, nobody).tolist()) == [1, 2]
    assert tree.stats() == {"granules": 0, "nodes": 0}


def test_what_is_in_use_stays_and_can_go_after_its_holder_passed_by() -> None:
    tree = RadixCache()
    tree.insert(b"", ids(1, 2), slots(1, 2))
    tree.insert(b"", ids(5), slots(5))
    held = np.array([1, 2])
    assert tree.evict(9, lambda granules: np.isin(granules, held)).tolist() == [5]
    assert tree.evict(9, nobody).size == 0, "a leaf in use leaves the order"
    tree.insert(b"", ids(1, 2), slots(1, 2))
    assert sorted(tree.evict(9, nobody).tolist()) == [1, 2]


def test_a_parent_that_lost_its_children_can_go_too() -> None:
    tree = RadixCache()
    tree.insert(b"", ids(1, 2), slots(1, 2))
    tree.insert(b"", ids(1, 2, 3), slots(1, 2, 3))
    tree.insert(b"", ids(1, 2, 4), slots(1, 2, 4))
    assert tree.evict(2, nobody).tolist() == [3, 4]
    assert sorted(tree.evict(2, nobody).tolist()) == [1, 2]


def test_remove_takes_everything_below() -> None:
    tree = RadixCache()
    tree.insert(b"", ids(1, 2, 3, 4), slots(1, 2, 3, 4))
    tree.insert(b"", ids(1, 2, 3, 5), slots(1, 2, 3, 5))
    tree.insert(b"", ids(1, 9), slots(1, 9))
    assert sorted(tree.remove(b"", ids(1, 2, 3, 4), 1).tolist()) == [2, 3, 4, 5]
    assert tree.match(b"", ids(1, 2, 3, 4)).tolist() == [1]
    assert tree.match(b"", ids(1, 9)).tolist() == [1, 9]
    assert tree.remove(b"", ids(1, 2), 1).size == 0
    assert tree.remove(b"x", ids(1), 0).size == 0
    assert sorted(tree.evict(9, nobody).tolist()) == [1, 9]


@settings(max_examples=80, deadline=None, derandomize=True)
@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=10), max_size=20), st.sampled_from([1, 2, 3]))
def test_it_agrees_with_a_dictionary_of_prefixes(prompts: list[list[int]], granule: int) -> None:
    tree = RadixCache(granule)
    model: dict[tuple[int, ...], int] = {}
    fresh = 0
    for prompt in prompts:
        content = ids(*prompt)
        prefixes = [tuple(prompt[:end]) for end in range(granule, len(prompt) + 1, granule)]
        known = [model[p] for p in prefixes if p in model]
        assert tree.match(b"", content).tolist() == known
        own = slots(*range(fresh, fresh + len(prefixes)))
        fresh += len(prefixes)
        new = tree.insert(b"", content, own)
        assert new.tolist() == own[len(known) :].tolist()
        model.update(zip(prefixes[len(known) :], new.tolist(), strict=True))
    assert tree.stats()["granules"] == len(model)
    assert sorted(tree.evict(10_000, nobody).tolist()) == sorted(model.values())
    assert tree.stats() == {"granules": 0, "nodes": 0}


def test_eviction_does_not_look_at_the_whole_tree() -> None:
    tree = RadixCache()
    for i in range(2_000):
        tree.insert(b"", np.arange(i * 1000, i * 1000 + 100), np.arange(i * 100, i * 100 + 100, dtype=np.int32))
    looked = 0

    def count(granules: Int32) -> np.ndarray:
        nonlocal looked
        looked += 1
        return nobody(granules)

    assert tree.evict(1_000, count).size == 1_000
    assert looked == 10


@pytest.mark.parametrize("granule", [1, 16])
def test_no_cache_keeps_nothing(granule: int) -> None:
    cache = NoCache(granule)
    assert cache.insert(b"", ids(1), slots(1)).size == 0
    assert cache.match(b"", ids(1)).size == 0
    assert cache.evict(1, nobody).size == 0
    assert cache.remove(b"", ids(1), 0).size == 0
    assert cache.stats() == {"granules": 0, "nodes": 0}
