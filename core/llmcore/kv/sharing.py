"""Bookkeeping of which live granules belong to one request and which are shared, without a scan of all rows.

A shared granule stays live when one of its holders ends. So the capacity forecast counts it once, apart from the
requests.
"""

from __future__ import annotations

import numpy as np

from llmcore.api.protocols import Int32
from llmcore.kv.slots import SlotPool


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
