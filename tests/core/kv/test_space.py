"""Several groups as one: hits are as long as every group's, and who holds a granule holds all above it."""

from __future__ import annotations

import numpy as np
from llmcore.builtin.radix import NoCache, RadixCache
from llmcore.kv.group import KVGroup
from llmcore.kv.space import KVSpace


def space(*granules: int, total: int = 64) -> KVSpace:
    return KVSpace([KVGroup(total=total // g, granule=g, rows=4, max_len=64, manager=RadixCache(g)) for g in granules])


def rows(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


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
