"""One KV group: its reference-counted granules, the host's copy of the request table, and the prefix cache."""

from __future__ import annotations

import numpy as np

from llmcore.api.protocols import Int32, Int64, KVManager
from llmcore.kv.sharing import Sharing
from llmcore.kv.slots import SlotPool

NO_GRANULES: Int32 = np.empty(0, np.int32)


class KVGroup:
    """`total` granules of g = `granule` tokens each, and a request table with `rows` rows, one per running request.

    `table[row, i]` is the granule of tokens [i * g, (i + 1) * g); granules are 0 .. total - 1. The manager (the
    prefix cache) only names granules: the group checks them against the reference counts before it acts on them.
    """

    def __init__(
        self, *, total: int, rows: int, max_len: int, manager: KVManager, granule: int = 1, name: str = "kv"
    ) -> None:
        self.name = name
        self.granule = granule
        self.pool = SlotPool(total, granule)
        self.sharing = Sharing(self.pool, rows)
        self.table = np.zeros((rows, self.granules(max_len)), np.int32)
        self.held = np.zeros(rows, np.int32)
        """[rows] number of granules in each row, reserved ones included."""
        self.manager = manager

    def granules(self, tokens: int) -> int:
        """Number of granules that hold `tokens` tokens."""
        return -(-tokens // self.granule)

    def granules_of(self, tokens: Int32) -> Int32:
        """`granules` of each element."""
        granules: Int32 = -(-tokens // self.granule)
        return granules

    def row(self, row: int) -> Int32:
        """The granules of a row, reserved ones included (a view)."""
        granules: Int32 = self.table[row, : self.held[row]]
        return granules

    def entries(self, row: int) -> tuple[Int32, Int32, Int32]:
        """All table entries of a row, as columns (row, at, granule)."""
        at = np.arange(self.held[row], dtype=np.int32)
        return np.full(at.size, row, np.int32), at, self.row(row).copy()

    def lack(self, rows: Int32, lengths: Int32) -> Int32:
        """Number of granules that each of `rows` still needs to hold `lengths` tokens."""
        missing: Int32 = np.maximum(self.granules_of(lengths) - self.held[rows], 0)
        return missing

    def grow(self, rows: Int32, lengths: Int32, limits: Int32) -> tuple[Int32, Int32, Int32]:
        """Give each of `rows` room for `lengths` tokens. The caller makes sure that enough granules are free.

        `limits` [rows]: the most tokens that each row can ever hold. A row that lacks less than a run gets a whole
        run, if its limit allows that and enough granules are free. The granules of a run are neighbours if a free
        run exists. Returns the new table entries as columns (row, at, granule).
        """
        lack = self.lack(rows, lengths)
        short = np.flatnonzero(lack)
        if not short.size:
            return NO_GRANULES, NO_GRANULES, NO_GRANULES
        rows, lack = rows[short], lack[short]
        room = self.granules_of(limits[short]) - self.held[rows]
        extra = self.pool.run - lack
        wish = np.flatnonzero((extra > 0) & (room >= self.pool.run))
        spare = self.pool.free - int(lack.sum())
        wish = wish[np.cumsum(extra[wish]) <= spare]
        runs = self.pool.alloc_runs(wish.size)
        lack[wish] = self.pool.run
        lack[wish[: len(runs)]] = 0
        rest = self.pool.alloc(int(lack.sum()))
        granules = np.concatenate([runs.reshape(-1), rest])
        lucky = rows[wish[: len(runs)]]
        index = np.concatenate([np.repeat(lucky, self.pool.run), np.repeat(rows, lack)])
        at = np.concatenate([_steps(self.held[lucky], self.pool.run), _spread(self.held[rows], lack)])
        self.table[index, at] = granules
        self.held[lucky] += self.pool.run
        self.held[rows] += lack
        self.sharing.own(index, granules)
        return index, at, granules

    def trim(self, rows: Int32, lengths: Int32) -> None:
        """Give back what `rows` reserved beyond `lengths` tokens."""
        keep = np.minimum(self.granules_of(lengths), self.held[rows])
        excess = self.held[rows] - keep
        if excess.any():
            tail = self.table[np.repeat(rows, excess), _spread(keep, excess)]
            self.held[rows] = keep
            self.pool.drop(tail)

    def take(self, row: int, granules: Int32) -> None:
        """Start an empty row with granules that other requests or the prefix cache hold."""
        self.sharing.take(row, granules)
        self.pool.hold(granules)
        self.table[row, : granules.size] = granules
        self.held[row] = granules.size

    def unshare(self, row: int, at: int) -> tuple[int, int] | None:
        """Make `table[row, at]` the row's own before a step writes to it.

        Returns the granules (src, dst) to copy, or None if the granule was the row's own already. One granule must be
        free.
        """
        src = self.table[row, at]
        if self.pool.holders[src] == 1 and not self.pool.kept[src]:
            return None
        dst = self.pool.alloc(1)
        self.sharing.swap(row, src)
        self._drop(self.table[row, at : at + 1].copy())
        self.table[row, at] = dst[0]
        self.sharing.own(np.array([row], np.int32), dst)
        return int(src), int(dst[0])

    def release(self, row: int) -> None:
        """Let a row give up all its granules."""
        self._drop(self.row(row).copy())
        self.held[row] = 0
        self.sharing.per_row[row] = 0

    def match(self, salt: bytes, content: Int64) -> Int32:
        """Granules of the longest cached prefix of `content`."""
        found = self.manager.match(salt, content)
        self.check_named(found, kept=True)
        return found

    def insert(self, salt: bytes, content: Int64, row: int) -> Int32:
        """Offer a row's first granules to the prefix cache; returns the ones that it took.

        `content`: the content ids in these granules; its length is a multiple of the granule.
        """
        new = self.manager.insert(salt, content, self.table[row, : content.size // self.granule].copy())
        self.check_named(new, kept=False)
        self.pool.keep(new)
        return new

    def remove(self, salt: bytes, content: Int64, start: int) -> Int32:
        """Drop `content` from token `start` on, and everything that continues it, from the prefix cache.

        Returns the dropped granules.
        """
        return self._forget(self.manager.remove(salt, content, start))

    def make_free(self, n: int) -> bool:
        """Evict granules that only the prefix cache holds until `n` are free; returns False if that is not enough."""
        short = n - self.pool.free
        if short > 0 and self.pool.cached:
            self._forget(self.manager.evict(min(short, self.pool.cached), self.pool.in_use))
        return self.pool.free >= n

    def _forget(self, granules: Int32) -> Int32:
        self.check_named(granules, kept=True)
        self.pool.forget(granules)
        return granules

    def check_named(self, granules: Int32, *, kept: bool) -> None:
        """Raise RuntimeError if the manager names a granule twice, or one that it must not name.

        With `kept` it may name only granules that it keeps, without `kept` only granules that it does not keep.
        """
        if granules.size and not (self.pool.distinct(granules) and (self.pool.kept[granules] == kept).all()):
            raise RuntimeError(
                f"the prefix cache of group {self.name!r} ({type(self.manager).__name__}) names granules twice, "
                "or granules that it must not name"
            )

    def _drop(self, granules: Int32) -> None:
        self.pool.drop(granules)
        self.sharing.dropped(granules)


def _steps(starts: Int32, n: int) -> Int32:
    return (starts[:, None] + np.arange(n, dtype=np.int32)).reshape(-1)


def _spread(starts: Int32, counts: Int32) -> Int32:
    """start, start + 1, … for each start, `counts` numbers each, concatenated."""
    ends = np.cumsum(counts)
    steps: Int32 = np.arange(int(ends[-1]) if ends.size else 0, dtype=np.int32)
    spread: Int32 = (steps + np.repeat(starts - (ends - counts), counts)).astype(np.int32)
    return spread
