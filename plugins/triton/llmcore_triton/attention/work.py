"""The list of what an attention launch does: which piece of which row's KV each program reads. Numpy only.

A row's query tokens are cut into tiles of `tokens`, and the KV that a tile sees into chunks; a tile and a chunk are an
item. The list is made from upper bounds of the lengths. On the device, where the true ones are, an item past a row's
end does nothing, and a tile whose KV is one chunk needs no merging.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from llmcore.api import AttnLimits, AttnRows
from numpy.typing import NDArray

Int32 = NDArray[np.int32]

FIELDS = 4
"""int32 numbers of an item: its row (-1: none), its tile in the row, its chunk in the tile (-1: all of them), and
where its partial results go, counted in query tokens."""

_UNEVEN = 1.25
"""The longest tile may take this much more than a program's share of the step before the KV is split, and than the
mean before the longest come first."""


@dataclass(frozen=True)
class Work:
    """`items` [(size + 1) * FIELDS]: first (tokens per chunk, -1, -1, -1), then the items.

    `split`: whether some tile has partial results to merge. `firsts`: where each tile's begin, counted in query
    tokens, -1 where it has none.
    """

    items: Int32
    size: int
    split: bool
    firsts: Int32


class Tiles(NamedTuple):
    """One entry per tile: its row, its place in the row, its query tokens, and most KV tokens that it reads."""

    row: Int32
    place: Int32
    tokens: Int32
    span: Int32


@dataclass
class Planner:
    """Cuts the rows of a step into about `items` items of equal size.

    `block`: KV tokens of a kernel's inner step, what chunks are multiples of. `least`: tokens of a chunk that are
    worth a program. `tokens`: query tokens of a tile, None where every row has one. `window`: tokens a query sees
    (None: all). `room`: query tokens' worth of partial results that there is place for. With `fixed`, chunks are that
    long, at multiples of it, and a tile's are either an item each or all in one: a result must not depend on which.
    """

    items: int
    block: int
    least: int
    tokens: int | None = None
    window: int | None = None
    fixed: int | None = None
    room: int = 0

    def reserve(self, limits: AttnLimits) -> int:
        """`room` for steps within `limits`, at least what it was."""
        self.room = max(self.room, 2 * limits.rows + 2 * self.items * (self.tokens or 1))
        return self.room

    def plan(self, rows: AttnRows) -> Work | None:
        """The items of a step, None where each row is one item and they are in the rows' order."""
        tiles = self._tiles(rows)
        if self.fixed is not None:
            chunk = self.fixed
            count, whole = self._fixed(tiles, chunk)
            return _listed(tiles, count, chunk, self._size(int(count.sum()), len(rows.kv_len)), whole)
        chunk, count = self._even(tiles)
        if not (count > 1).any():
            uneven = len(count) > self.items and tiles.span.max() > _UNEVEN * tiles.span.mean()
            if self.tokens is None and not uneven:
                return None
            if uneven:
                # a long one that begins last would run alone at the end
                order = np.argsort(-tiles.span, kind="stable")
                tiles, count = Tiles(*(column[order] for column in tiles)), count[order]
        return _listed(tiles, count, chunk, self._size(int(count.sum()), len(rows.kv_len)))

    def _tiles(self, rows: AttnRows) -> Tiles:
        length = rows.kv_len
        if self.tokens is None:
            span, row = length, np.arange(len(length), dtype=np.int32)
            place, tokens = np.zeros_like(row), np.ones_like(row)
        else:
            each = -(-rows.n_query // self.tokens)
            row = np.repeat(np.arange(len(length), dtype=np.int32), each)
            place = np.arange(len(row), dtype=np.int32) - (np.cumsum(each, dtype=np.int32) - each)[row]
            left = rows.n_query[row] - place * self.tokens
            tokens = np.minimum(left, self.tokens)
            span = length[row] - left + tokens
        if self.window is not None:
            # reading starts at a border of blocks (of chunks where these are fixed) up to one short of it too early
            span = np.minimum(span, self.window + (self.tokens or 1) + (self.fixed or self.block) - 2)
        return Tiles(row, place, tokens, span)

    def _even(self, tiles: Tiles) -> tuple[int, Int32]:
        """Tokens per chunk, and each tile's chunks."""
        span = tiles.span
        longest, fair = int(span.max(initial=1)), self._fair(span)
        if longest <= max(2 * self.least, _UNEVEN * float(span.sum()) / self.items):
            return self._blocks(longest), np.minimum(span, 1)
        # Few tiles are all cut alike: items beyond what runs at once would be a second round of a few.
        most = self.items if 2 * len(span) <= self.items else len(span) + self.items * longest
        pieces = -(-longest // self._blocks(max(fair, self.least)))
        while True:
            chunk = self._blocks(longest / pieces)
            count = -(-span // chunk)
            if pieces == 1 or (count.sum() <= most and self._needed(tiles, count, count > 1) <= self.room):
                return chunk, count
            pieces -= 1

    def _fixed(self, tiles: Tiles, chunk: int) -> tuple[Int32, NDArray[np.bool_]]:
        """Each tile's items, and which tiles are one item whatever their chunks."""
        span = tiles.span
        count = -(-span // chunk)
        long = max(2 * self._fair(span), chunk)
        while self._needed(tiles, count, span > long) > self.room:
            long *= 2
        whole = span <= long
        return np.where(whole, np.minimum(count, 1), count), whole

    def _fair(self, span: Int32) -> float:
        """KV tokens of an item: with many tiles about two of theirs, so that no long one is left at the end."""
        return float(span.sum()) / max(self.items, len(span) / 2)

    @staticmethod
    def _needed(tiles: Tiles, count: Int32, split: NDArray[np.bool_]) -> int:
        return int((count * tiles.tokens)[split].sum(dtype=np.int64))

    def _blocks(self, tokens: float) -> int:
        return max(-int(-tokens // self.block), 1) * self.block

    def _size(self, items: int, rows: int) -> int:
        """Few sizes, because a graph is captured for each; the items past the last do nothing."""
        if self.tokens is None:
            return max(-(-items // self.items), 1) * self.items if items > rows else rows
        size = self.items
        while size < items:
            size *= 2
        return size


def _listed(tiles: Tiles, count: Int32, chunk: int, size: int, whole: NDArray[np.bool_] | None = None) -> Work:
    used = int(count.sum())
    tile = np.repeat(np.arange(len(count), dtype=np.int32), count)
    place = np.arange(used, dtype=np.int32) - (np.cumsum(count, dtype=np.int32) - count)[tile]
    # Only tiles that are split take room for partial results.
    takes = np.where(count > 1, count * tiles.tokens, 0)
    begin = np.cumsum(takes, dtype=np.int32) - takes
    at = begin[tile] + place * tiles.tokens[tile]
    items = np.full((size + 1, FIELDS), -1, np.int32)
    items[0, 0] = chunk
    mine = items[1 : used + 1]
    mine[:, 0], mine[:, 1], mine[:, 3] = tiles.row[tile], tiles.place[tile], at
    mine[:, 2] = place if whole is None else np.where(whole[tile], -1, place)
    firsts = np.where(takes > 0, begin, -1).astype(np.int32)
    return Work(items.reshape(-1), size, bool((count > 1).any()), firsts)
