"""Which live granules are one request's own and which are shared, kept up to date without looking at every row.

A shared granule outlives any one of its holders, so the future peak counts it once, apart from the requests.
"""

from __future__ import annotations

import numpy as np

from llmcore.kv.slots import SlotPool
from llmcore.protocols import Int32


class Sharing:
    """Owner and shared mark per granule, shared granules per request row.

    A granule becomes shared when a second request takes it, and stays so until nobody holds it.
    """

    def __init__(self, pool: SlotPool, rows: int) -> None:
        self._pool = pool
        self._owner = np.zeros(pool.total, np.int32)
        self._shared = np.zeros(pool.total, np.bool_)
        self.per_row = np.zeros(rows, np.int32)
        """[rows] shared granules in each request's row."""
        self.total = 0
        """Live granules that are shared, each counted once."""

    def own(self, rows: Int32, granules: Int32) -> None:
        """`granules` were allocated for `rows`, elementwise."""
        self._owner[granules] = rows

    def newly_shared(self, granules: Int32) -> Int32:
        """Those of `granules` that would become shared if one more request took them."""
        return granules[(self._pool.holders[granules] > 0) & ~self._shared[granules]]

    def owners(self, granules: Int32) -> Int32:
        """The row that each of `granules` (live, not shared) belongs to."""
        owners: Int32 = self._owner[granules]
        return owners

    def take(self, row: int, granules: Int32) -> None:
        """`row`, which holds nothing yet, is about to hold `granules`."""
        new = self.newly_shared(granules)
        np.add.at(self.per_row, self._owner[new], np.int32(1))
        self._shared[new] = True
        self.total += new.size
        self._owner[granules[self._pool.holders[granules] == 0]] = row
        self.per_row[row] = int(np.count_nonzero(self._shared[granules]))

    def swap(self, row: int, granule: int) -> None:
        """`row` is about to replace `granule` by one of its own."""
        self.per_row[row] -= int(self._shared[granule])

    def dropped(self, granules: Int32) -> None:
        """One holder let go of `granules`."""
        idle = granules[(self._pool.holders[granules] == 0) & self._shared[granules]]
        self._shared[idle] = False
        self.total -= idle.size
