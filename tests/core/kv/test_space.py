"""A KV group: rows that grow in runs, shared granules, and a manager that is not believed. Several groups as one: hits
are as long as every group's, and a request that holds a granule holds all before it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from llmcore.builtin.radix import NoCache, RadixCache
from llmcore.kv.space import KVGroup, KVSpace


def rows(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def group(total: int = 64, granule: int = 1, manager: Any = None) -> KVGroup:
    return KVGroup(total=total, granule=granule, rows=4, max_len=64, manager=manager or RadixCache(granule))


def test_decode_rows_get_runs_of_neighbours() -> None:
    kv = group()
    index, at, granules = kv.grow(rows(0, 1), rows(3, 1), rows(40, 40))
    assert index.size == 32
    for row in (0, 1):
        assert (np.diff(granules[index == row]) == 1).all()
        assert at[index == row].tolist() == list(range(16))
    assert kv.grow(rows(0, 1), rows(16, 2), rows(40, 40))[0].size == 0, "they live on their reserve"
    kv.trim(rows(0, 1), rows(4, 2))
    assert kv.held[:2].tolist() == [4, 2]
    assert (kv.pool.live, kv.pool.free) == (6, 58)


def test_no_more_is_reserved_than_a_row_can_come_to_hold_or_than_is_free() -> None:
    kv = group(total=18)
    assert kv.grow(rows(0), rows(3), rows(5))[0].size == 3
    assert kv.grow(rows(1), rows(1), rows(40))[0].size == 1
    assert kv.pool.free == 14


@pytest.mark.parametrize("granule", [1, 2, 16])
def test_rows_of_several_lengths_are_written_as_they_are_held(granule: int) -> None:
    kv = group(granule=granule)
    index, at, granules = kv.grow(rows(2, 0, 3), rows(33, 5, 17), rows(40, 40, 40))
    assert (kv.table[index, at] == granules).all()
    for row, length in ((2, 33), (0, 5), (3, 17)):
        assert kv.held[row] >= kv.granules(length)
        assert sorted(at[index == row].tolist()) == list(range(kv.held[row]))
    assert np.unique(granules).size == granules.size


def test_a_shared_granule_is_replaced_before_it_is_written() -> None:
    kv = group(granule=4)
    kv.grow(rows(0), rows(6), rows(6))
    kv.take(1, kv.row(0).copy())
    assert kv.sharing.per_row[:2].tolist() == [2, 2]
    src, dst = kv.unshare(0, 1) or (-1, -1)
    assert src != dst and kv.table[0, 1] == dst and kv.table[1, 1] == src
    assert kv.unshare(1, 1) is None, "the last holder writes in place"
    assert kv.sharing.per_row[:2].tolist() == [1, 2]
    kv.release(0)
    kv.release(1)
    kv.pool.check()
    assert (kv.pool.free, kv.sharing.total) == (kv.pool.total, 0)


def test_a_granule_that_replaces_a_shared_one_is_its_rows_own() -> None:
    kv = group(granule=4)
    kv.grow(rows(0, 3), rows(12, 4), rows(12, 4))
    kv.take(1, kv.row(0).copy())
    _, dst = kv.unshare(1, 2) or (-1, -1)
    assert kv.sharing.per_row.tolist() == [3, 2, 0, 0], "it shares two of three"
    assert kv.sharing.owners(rows(dst)).tolist() == [1]
    assert kv.sharing.owners(kv.row(3)).tolist() == [3], "nothing else has another owner"


def test_sharing_counts_each_granule_once() -> None:
    kv = group()
    kv.grow(rows(0), rows(10), rows(10))
    kv.insert(b"", np.arange(10), 0)
    hit = kv.match(b"", np.arange(8))
    assert kv.sharing.owners(kv.sharing.newly_shared(hit)).tolist() == [0] * 8
    kv.take(1, hit)
    kv.take(2, hit[:4])
    assert (kv.sharing.total, kv.sharing.per_row[:3].tolist()) == (8, [8, 8, 4])
    kv.release(0)
    assert (kv.sharing.total, kv.pool.cached) == (8, 2)
    kv.release(1)
    assert kv.sharing.total == 4
    kv.release(2)
    assert (kv.sharing.total, kv.pool.live, kv.pool.cached) == (0, 0, 10)
    assert not kv.sharing.per_row.any()
    kv.take(3, hit)
    assert kv.sharing.per_row[3] == 0, "what only the cache held is its own now"


def test_room_is_made_from_the_cache_only() -> None:
    kv = group(total=20)
    kv.grow(rows(0), rows(12), rows(12))
    kv.insert(b"", np.arange(12), 0)
    assert not kv.make_free(9)
    kv.insert(b"", np.arange(12), 0)
    kv.release(0)
    assert kv.make_free(15)
    assert (kv.pool.cached, kv.pool.free) == (5, 15)


@pytest.mark.parametrize("lie", ["match", "insert", "evict", "remove"])
def test_a_manager_that_lies_is_found_out(lie: str) -> None:
    class Liar(RadixCache):
        pass

    setattr(Liar, lie, lambda self, *args: rows(3, 3))
    kv = group(total=16, manager=Liar())
    with pytest.raises(RuntimeError, match=r"Liar\) names granules twice"):
        kv.match(b"", np.arange(2))
        kv.grow(rows(0), rows(8), rows(8))
        kv.insert(b"", np.arange(8), 0)
        kv.insert(b"", np.arange(8), 0)
        kv.remove(b"", np.arange(8), 7)
        kv.release(0)
        kv.make_free(16)


# --- several groups


def space(*granules: int, total: int = 64) -> KVSpace:
    return KVSpace([KVGroup(total=total // g, granule=g, rows=4, max_len=64, manager=RadixCache(g)) for g in granules])


def fill(kv: KVSpace, row: int, tokens: int) -> None:
    for group in kv.groups:
        group.grow(rows(row), rows(tokens), rows(tokens))


def test_a_hit_counts_only_as_far_as_every_group_holds_it() -> None:
    kv = space(1, 4)
    assert (kv.granule, kv.floor(11)) == (4, 8)
    fill(kv, 0, 16)
    assert kv.enter(b"", np.arange(16), 0) == 0
    assert kv.match(b"", np.arange(15)).tokens == 12
    kv.groups[0].remove(b"", np.arange(16), 9)
    hit = kv.match(b"", np.arange(16))
    assert (hit.tokens, [g.size for g in hit.granules]) == (8, [8, 2])
    kv.take(1, hit)
    kv.check()


def test_only_what_hangs_below_ones_own_enters_while_running() -> None:
    kv = space(1)
    fill(kv, 0, 8)
    fill(kv, 1, 12)
    assert kv.enter(b"", np.arange(8), 0) == 0
    assert kv.enter(b"", np.arange(8), 0) is None
    assert kv.enter(b"", np.arange(12), 1) is None, "another holds what lies above"
    kv.release(1, b"", np.arange(12))
    assert kv.match(b"", np.arange(12)).tokens == 12, "once it ends it may enter"
    kv.check()


def test_removing_names_those_who_hold_some_of_it() -> None:
    kv = space(1)
    fill(kv, 0, 8)
    kv.enter(b"", np.arange(8), 0)
    kv.take(2, kv.match(b"", np.arange(4)))
    kv.take(3, kv.match(b"", np.arange(2)))
    assert kv.remove(b"", np.arange(8), 3, rows(0, 2, 3)).tolist() == [0, 2]
    assert kv.match(b"", np.arange(8)).tokens == 3
    assert kv.remove(b"", np.arange(8), 0, rows()).tolist() == []
    kv.check()


def test_removing_looks_at_every_group() -> None:
    kv = space(1, 1)
    fill(kv, 0, 8)
    kv.enter(b"", np.arange(8), 0)
    kv.take(2, kv.match(b"", np.arange(4)))
    kv.groups[1].remove(b"", np.arange(8), 0)
    assert kv.remove(b"", np.arange(8), 3, rows(0, 2)).tolist() == [0, 2], "only the first group still had it"


def test_room_must_be_there_in_every_group() -> None:
    kv = space(1, 16)
    assert kv.secure(rows(0, 1), rows(0, 0), rows(32, 32))
    assert not kv.secure(rows(0, 1, 2), rows(0, 0, 0), rows(17, 17, 17)), "three rows of two granules of 16"


def test_forks_copy_what_they_write() -> None:
    kv = space(1, 4)
    fill(kv, 0, 6)
    kv.fork(0, 1, 6)
    kv.fork(0, 2, 6)
    writes, copies = kv.unshare(rows(0, 1, 2), rows(6, 6, 6))
    assert [len(pairs) for pairs in copies] == [0, 2]
    assert writes[1][0].tolist() == [0, 1]
    kv.check()


def test_caching_is_known() -> None:
    assert space(1).caching
    assert not KVSpace([KVGroup(total=4, rows=1, max_len=4, manager=NoCache())]).caching
