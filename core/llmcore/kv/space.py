"""The KV groups of a model, and all of them as one space.

A group has reference-counted granules, the host's copy of the request table, and the prefix cache. A request needs
granules in every group, and a prefix hit exists in every group.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from llmcore.api.protocols import Int32, Int64, KVManager
from llmcore.kv.slots import Sharing, SlotPool

NO_GRANULES: Int32 = np.empty(0, np.int32)

Columns = tuple[Int32, Int32, Int32]
"""Table entries as columns (row, at, granule)."""


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


@dataclass(frozen=True)
class Hit:
    """A cached prefix that every group holds."""

    tokens: int
    """Length of the prefix."""
    granules: tuple[Int32, ...]
    """For each group, the granules that hold the prefix."""


class KVSpace:
    """The groups in the model's order.

    `granule` is the least common multiple of their granules. The length of a prefix hit is a multiple of it.
    """

    def __init__(self, groups: Sequence[KVGroup]) -> None:
        self.groups = tuple(groups)
        self.granule = math.lcm(*(group.granule for group in groups))

    @property
    def caching(self) -> bool:
        """True if every group's prefix cache keeps prompts for later requests."""
        return all(group.manager.caching for group in self.groups)

    def floor(self, tokens: int) -> int:
        """`tokens` rounded down to a multiple of `granule`."""
        return tokens // self.granule * self.granule

    def match(self, salt: bytes, content: Int64) -> Hit:
        """The longest prefix of `content` that every group holds."""
        found = [group.match(salt, content) for group in self.groups]
        tokens = min(group.granule * granules.size for group, granules in zip(self.groups, found, strict=True))
        tokens = self.floor(tokens)
        return Hit(tokens, tuple(g[: tokens // group.granule] for group, g in zip(self.groups, found, strict=True)))

    def take(self, row: int, hit: Hit) -> None:
        """Start an empty row with a hit."""
        for group, granules in zip(self.groups, hit.granules, strict=True):
            group.take(row, granules)

    def fork(self, row: int, fork: int, tokens: int) -> None:
        """Start the empty row `fork` with the granules of the first `tokens` tokens of `row`."""
        for group in self.groups:
            group.take(fork, group.table[row, : group.granules(tokens)].copy())

    def entries(self, row: int, tokens: int) -> list[Columns]:
        """For each group, the table entries of a row's first `tokens` tokens."""
        columns = []
        for group in self.groups:
            at = np.arange(group.granules(tokens), dtype=np.int32)
            columns.append((np.full(at.size, row, np.int32), at, group.table[row, : at.size].copy()))
        return columns

    def enter(self, salt: bytes, content: Int64, row: int) -> int | None:
        """Offer the prompt of a row that goes on running to the prefix cache; returns the first token that is new.

        Returns None if nothing was inserted: the cache has the whole prompt already, or it holds other granules than
        the row for the beginning of the prompt. In the second case the row offers its granules when it ends. So a
        request that holds a cached granule also holds all granules before it.
        """
        content = content[: self.floor(content.size)]
        start = content.size
        for group in self.groups:
            known = group.manager.match(salt, content)
            if not np.array_equal(known, group.table[row, : known.size]):
                return None
            start = min(start, known.size * group.granule)
        if start < content.size:
            for group in self.groups:
                group.insert(salt, content, row)
        return start if start < content.size else None

    def release(self, row: int, salt: bytes, content: Int64) -> None:
        """Offer `content`, all that is valid in a row, to the prefix cache; then let the row give up all granules."""
        content = content[: self.floor(content.size)]
        for group in self.groups:
            if content.size:
                group.insert(salt, content, row)
            group.release(row)

    def drop(self, row: int) -> None:
        """Let a row give up all granules without an offer to the prefix cache."""
        for group in self.groups:
            group.release(row)

    def remove(self, salt: bytes, content: Int64, start: int, rows: Int32) -> Int32:
        """Drop `content` from token `start` on, and everything that continues it, from the prefix cache.

        Returns the `rows` that hold any dropped granule.
        """
        holds = np.zeros(rows.size, np.bool_)
        for group in self.groups:
            dropped = group.remove(salt, content, start)
            marked = np.zeros(group.pool.total, np.bool_)
            marked[dropped] = True
            holds |= np.array([marked[group.row(int(row))].any() for row in rows], np.bool_)
        return rows[holds]

    def secure(self, rows: Int32, starts: Int32, lengths: Int32) -> bool:
        """Free enough granules in every group for `rows` to grow from `starts` to `lengths` tokens.

        Returns False if that is not possible.
        """
        for group in self.groups:
            lack = group.lack(rows, lengths)
            need = int(lack.sum()) + self._copies(group, rows, starts)
            if not group.make_free(need):
                return False
            # Make room for whole runs too, but evict at most an eighth of the cached granules for that.
            spare = int(np.count_nonzero(lack)) * group.pool.run - need
            if spare > 0:
                group.make_free(need + min(spare, group.pool.cached // 8))
        return True

    def trim(self, rows: Int32, lengths: Int32) -> None:
        """Give back what `rows` reserved beyond `lengths` tokens."""
        for group in self.groups:
            group.trim(rows, lengths)

    def unshare(self, rows: Int32, starts: Int32) -> tuple[list[Columns], list[list[tuple[int, int]]]]:
        """Make every granule that `rows` will write from token `starts` on the row's own.

        Returns, for each group, the table entries that changed and the granules (src, dst) to copy.
        """
        writes: list[Columns] = []
        copies: list[list[tuple[int, int]]] = []
        for group in self.groups:
            pairs, at = [], []
            for i in np.flatnonzero(self._borrowed(group, rows, starts)):
                place = int(starts[i]) // group.granule
                pair = group.unshare(int(rows[i]), place)
                if pair is not None:
                    pairs.append(pair)
                    at.append((int(rows[i]), place, pair[1]))
            copies.append(pairs)
            columns = np.array(at, np.int32).reshape(-1, 3).T
            writes.append((columns[0], columns[1], columns[2]))
        return writes, copies

    def pending_copies(self, group: KVGroup, rows: Int32, starts: Int32) -> Int32:
        """[rows] 1 if a row's next write needs a granule of its own in place of a shared one, else 0."""
        return self._borrowed(group, rows, starts).astype(np.int32)

    def check(self) -> None:
        """Assert the invariants of every group's pool, and that its reference counts match its rows."""
        for group in self.groups:
            group.pool.check()
            counted = np.zeros(group.pool.total, np.int32)
            for row in np.flatnonzero(group.held):
                counted[group.row(int(row))] += 1
            assert (counted == group.pool.holders).all(), f"rows of {group.name!r} and the counts disagree"

    def _copies(self, group: KVGroup, rows: Int32, starts: Int32) -> int:
        """Number of granules that `rows` need for copies. The last holder of a granule writes in place."""
        if group.granule == 1:
            return 0
        borrowed = np.flatnonzero(self._borrowed(group, rows, starts))
        granules, writers = np.unique(
            group.table[rows[borrowed], starts[borrowed] // group.granule], return_counts=True
        )
        return int(writers.sum() - np.count_nonzero(writers == group.pool.holders[granules]))

    @staticmethod
    def _borrowed(group: KVGroup, rows: Int32, starts: Int32) -> NDArray[np.bool_]:
        if group.granule == 1:
            return np.zeros(rows.size, np.bool_)
        inside = starts % group.granule != 0
        granules = group.table[rows, np.minimum(starts // group.granule, group.table.shape[1] - 1)]
        borrowed: NDArray[np.bool_] = inside & (group.pool.holders[granules] > 1)
        return borrowed
