"""All KV groups of a model as one: a request needs granules in every group, and a prefix hit exists in every group."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from llmcore.api.protocols import Int32, Int64
from llmcore.kv.group import KVGroup

Columns = tuple[Int32, Int32, Int32]
"""Table entries as columns (row, at, granule)."""


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
