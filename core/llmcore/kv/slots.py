"""KV slots of one group in granules of g tokens: reference counts, free granules, and the granules that are shared.

A request, a fork or the prefix cache can hold a granule. `live` counts the granules that at least one request holds,
`cached` those that only the prefix cache holds. After every call, live + cached + free == total.

A shared granule stays live when one of its holders ends. So the capacity forecast counts it once, apart from the
requests. `Sharing` tells which live granules belong to one request and which are shared, without a scan of all rows.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from llmcore.api.protocols import Int32

RUN_TOKENS = 16
"""Number of neighbouring slots that are reserved together for a decoding request."""

# ufunc.at is fast only if both operands have the same type.
_ONE = np.int32(1)


class IdStack:
    """A stack of distinct ids below `n`: last in, first out."""

    def __init__(self, n: int) -> None:
        self._items = np.empty(n, np.int32)
        self._present = np.zeros(n, np.bool_)
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def push(self, ids: Int32) -> None:
        """Add `ids`, which are distinct. An id that the stack has already is skipped."""
        new = ids[~self._present[ids]]
        self._items[self._size : self._size + new.size] = new
        self._present[new] = True
        self._size += new.size

    def pop(self, n: int) -> Int32:
        """Take the up to `n` ids that were pushed last; returns them in the order in which they were pushed."""
        low = max(self._size - n, 0)
        taken: Int32 = self._items[low : self._size].copy()
        self._present[taken] = False
        self._size = low
        return taken


class SlotPool:
    """Reference counts of `total` granules, and an allocator that keeps neighbours together.

    Granules form blocks of one run (`RUN_TOKENS` tokens, or one granule if that is more). One stack has the blocks
    that are free as a whole, another the loose free granules. When a block becomes free as a whole, its granules stay
    on the loose stack; the allocator skips them there. An array that a caller passes names each granule once.
    """

    def __init__(self, total: int, granule: int = 1) -> None:
        if total < 1 or granule < 1:
            raise ValueError(f"a slot pool needs at least one granule of one token, not {total} of {granule}")
        self.total = total
        self.granule = granule
        self.run = max(1, RUN_TOKENS // granule)
        self.holders = np.zeros(total, np.int32)
        """[total] number of requests that hold each granule."""
        self.kept = np.zeros(total, np.bool_)
        """[total] True if the prefix cache holds the granule."""
        self._live = 0
        self._cached = 0
        n_blocks = -(-total // self.run)
        self._room = np.full(n_blocks, self.run, np.int32)
        self._room[-1] = total - (n_blocks - 1) * self.run
        self._whole = IdStack(n_blocks)
        self._loose = IdStack(total)
        self._offsets = np.arange(self.run, dtype=np.int32)
        self._order = np.arange(total, dtype=np.int32)
        self._mark = np.zeros(total, np.int32)
        self._shelve(self._order)

    @property
    def live(self) -> int:
        """Number of granules that at least one request holds."""
        return self._live

    @property
    def cached(self) -> int:
        """Number of granules that only the prefix cache holds."""
        return self._cached

    @property
    def free(self) -> int:
        """Number of granules that neither a request nor the prefix cache holds."""
        return self.total - self._live - self._cached

    def alloc(self, n: int) -> Int32:
        """Allocate `n` granules for one request: whole runs first, then loose ones. ValueError if too few are free."""
        if n > self.free:
            raise ValueError(f"{n} granules asked for, {self.free} free")
        runs = self.alloc_runs(n // self.run)
        return np.concatenate([runs.reshape(-1), self._alloc_loose(n - runs.size)])

    def alloc_runs(self, n: int) -> Int32:
        """Allocate up to `n` runs of neighbouring granules, each for one request; returns granules [k, run]."""
        runs: Int32 = self._whole.pop(n)[:, None] * self.run + self._offsets
        self._take(runs.reshape(-1))
        return runs

    def hold(self, granules: Int32) -> None:
        """Note that one more request holds `granules`, which are live or cached already."""
        before = self.holders[granules]
        woken = int(np.count_nonzero(before == 0))
        self.holders[granules] = before + 1
        self._live += woken
        self._cached -= woken

    def drop(self, granules: Int32) -> None:
        """Note that one request gave up `granules`; those without any other holder become free."""
        left = self.holders[granules] - 1
        self.holders[granules] = left
        idle = granules[left == 0]
        kept = self.kept[idle]
        self._live -= idle.size
        self._cached += int(np.count_nonzero(kept))
        self._release(idle[~kept])

    def keep(self, granules: Int32) -> None:
        """Note that the prefix cache holds `granules`, which requests hold now."""
        self.kept[granules] = True

    def forget(self, granules: Int32) -> None:
        """Note that the prefix cache gave up `granules`; the ones that no request holds become free."""
        self.kept[granules] = False
        idle = granules[self.holders[granules] == 0]
        self._cached -= idle.size
        self._release(idle)

    def in_use(self, granules: Int32) -> NDArray[np.bool_]:
        """For each of `granules`, True if a request holds it."""
        used: NDArray[np.bool_] = self.holders[granules] > 0
        return used

    def distinct(self, granules: Int32) -> bool:
        """True if `granules` names each granule at most once."""
        if granules.size > self.total:
            return False
        order = self._order[: granules.size]
        self._mark[granules] = order
        return bool((self._mark[granules] == order).all())

    def check(self) -> None:
        """Assert that the counters agree with a fresh count."""
        live = int(np.count_nonzero(self.holders > 0))
        cached = int(np.count_nonzero(self.kept & (self.holders == 0)))
        assert (self.holders >= 0).all(), "a granule was let go more often than it was held"
        assert (live, cached) == (self._live, self._cached), "counters disagree with the counts"
        assert int(self._room.sum()) == self.free, "live + cached + free != total"

    def _alloc_loose(self, n: int) -> Int32:
        parts: list[Int32] = []
        while n > 0:
            if len(self._loose):
                found = self._loose.pop(n)
                idle = (self.holders[found] == 0) & ~self.kept[found]
                found = found[idle & (self._room[found // self.run] < self.run)]
            else:
                blocks = self._whole.pop(-(-n // self.run))
                granules = (blocks[:, None] * self.run + self._offsets).reshape(-1)
                found = granules[:n]
                self._loose.push(granules[n:])
            self._take(found)
            parts.append(found)
            n -= found.size
        return np.concatenate(parts) if parts else np.empty(0, np.int32)

    def _take(self, granules: Int32) -> None:
        self.holders[granules] = 1
        self._live += granules.size
        np.subtract.at(self._room, granules // self.run, _ONE)

    def _release(self, granules: Int32) -> None:
        if granules.size:
            np.add.at(self._room, granules // self.run, _ONE)
            self._shelve(granules)

    def _shelve(self, granules: Int32) -> None:
        blocks = granules // self.run
        whole = self._room[blocks] == self.run
        self._loose.push(granules[~whole])
        blocks = blocks[whole]
        order = self._order[: blocks.size]
        self._mark[blocks] = order
        self._whole.push(blocks[self._mark[blocks] == order])


class Sharing:
    """The owner and a shared mark of each granule, and the number of shared granules in each request's row.

    A granule becomes shared when a second request takes it, and stays shared until no request holds it.
    """

    def __init__(self, pool: SlotPool, rows: int) -> None:
        self._pool = pool
        self._owner = np.zeros(pool.total, np.int32)
        self._shared = np.zeros(pool.total, np.bool_)
        self.per_row = np.zeros(rows, np.int32)
        """[rows] number of shared granules in each request's row."""
        self.total = 0
        """Number of live granules that are shared, each counted once."""

    def own(self, rows: Int32, granules: Int32) -> None:
        """Note that `granules` were allocated for `rows`, elementwise."""
        self._owner[granules] = rows

    def newly_shared(self, granules: Int32) -> Int32:
        """The `granules` that would become shared if one more request took them."""
        return granules[(self._pool.holders[granules] > 0) & ~self._shared[granules]]

    def owners(self, granules: Int32) -> Int32:
        """The row to which each of `granules` (live, not shared) belongs."""
        owners: Int32 = self._owner[granules]
        return owners

    def take(self, row: int, granules: Int32) -> None:
        """Note that `row`, which is empty, is about to hold `granules`. Call it before the pool counts them."""
        new = self.newly_shared(granules)
        np.add.at(self.per_row, self._owner[new], np.int32(1))
        self._shared[new] = True
        self.total += new.size
        self._owner[granules[self._pool.holders[granules] == 0]] = row
        self.per_row[row] = int(np.count_nonzero(self._shared[granules]))

    def swap(self, row: int, granule: int) -> None:
        """Note that `row` is about to replace `granule` by one of its own."""
        self.per_row[row] -= int(self._shared[granule])

    def dropped(self, granules: Int32) -> None:
        """Note that one request gave up `granules`. Call it after the pool has counted that."""
        idle = granules[(self._pool.holders[granules] == 0) & self._shared[granules]]
        self._shared[idle] = False
        self.total -= idle.size
