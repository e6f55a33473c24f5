"""The list of an attention launch's work: which part of which row's KV each program reads. Numpy only.

A row's query tokens are cut into tiles of `tokens`, and the KV that a tile sees into chunks. A tile and a chunk are an
item. The host makes the list from upper bounds of the lengths; the device has the true ones. An item past a row's end
does nothing, and a tile whose KV is one chunk is not merged.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from llmcore.api import AttnLimits, AttnRows
from numpy.typing import NDArray

Int32 = NDArray[np.int32]

FIELDS = 4
"""int32 numbers of an item: its row (-1: none), its tile in the row, its chunk in the tile (-1: all of them), and the
place of its partial results, counted in query tokens."""

_UNEVEN = 1.25
"""KV is split if the longest tile exceeds a program's share of the step by more than this factor. The longest tiles
come first if one exceeds the mean by more than this factor."""


@dataclass(frozen=True)
class Work:
    """`items` [(size + 1) * FIELDS]: first (tokens per chunk, -1, -1, -1), then the items.

    `split`: some tile has partial results to merge. `firsts`: where each tile's partial results begin, counted in
    query tokens; -1 if it has none.
    """

    items: Int32
    size: int
    split: bool
    firsts: Int32


class Tiles(NamedTuple):
    """One entry per tile: its row, its place in the row, its query tokens, and the most KV tokens that it may read."""

    row: Int32
    place: Int32
    tokens: Int32
    span: Int32


@dataclass
class Planner:
    """Cuts the rows of a step into about `items` items of equal size."""

    items: int
    block: int
    """KV tokens of a kernel's inner step. Chunks are multiples of it."""
    least: int
    """The least tokens of a chunk that are worth a program."""
    tokens: int | None = None
    """Query tokens of a tile, None if every row has one."""
    window: int | None = None
    """Tokens that a query sees, None for all."""
    fixed: int | None = None
    """Tokens of a chunk if chunks are fixed. Chunks then begin at its multiples, and each is an item, or all of a
    tile's are one item. Results must not depend on which."""
    room: int = 0
    """Query tokens for which there is memory for partial results."""

    def reserve(self, limits: AttnLimits) -> int:
        """Set `room` for steps within `limits`. It never shrinks."""
        self.room = max(self.room, 2 * limits.rows + 2 * self.items * (self.tokens or 1))
        return self.room

    def plan(self, rows: AttnRows) -> Work | None:
        """Returns the items of a step. None: each row is one item, in the rows' order."""
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
                # a long tile that begins last would run alone at the end
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
            # reading starts at a multiple of the block (or fixed chunk), up to that size minus 1 too early
            span = np.minimum(span, self.window + (self.tokens or 1) + (self.fixed or self.block) - 2)
        return Tiles(row, place, tokens, span)

    def _even(self, tiles: Tiles) -> tuple[int, Int32]:
        """Returns the tokens per chunk, and the chunks of each tile."""
        span = tiles.span
        longest, fair = int(span.max(initial=1)), self._fair(span)
        if longest <= max(2 * self.least, _UNEVEN * float(span.sum()) / self.items):
            return self._blocks(longest), np.minimum(span, 1)
        # Few tiles are all cut alike: more items than run at once would mean a second, nearly empty round.
        most = self.items if 2 * len(span) <= self.items else len(span) + self.items * longest
        pieces = -(-longest // self._blocks(max(fair, self.least)))
        while True:
            chunk = self._blocks(longest / pieces)
            count = -(-span // chunk)
            if pieces == 1 or (count.sum() <= most and self._needed(tiles, count, count > 1) <= self.room):
                return chunk, count
            pieces -= 1

    def _fixed(self, tiles: Tiles, chunk: int) -> tuple[Int32, NDArray[np.bool_]]:
        """Returns the items of each tile, and which tiles are one item whatever their chunks."""
        span = tiles.span
        count = -(-span // chunk)
        long = max(2 * self._fair(span), chunk)
        while self._needed(tiles, count, span > long) > self.room:
            long *= 2
        whole = span <= long
        return np.where(whole, np.minimum(count, 1), count), whole

    def _fair(self, span: Int32) -> float:
        """The KV tokens of an item. With many tiles it is twice their mean, so that no long one is left at the end."""
        return float(span.sum()) / max(self.items, len(span) / 2)

    @staticmethod
    def _needed(tiles: Tiles, count: Int32, split: NDArray[np.bool_]) -> int:
        return int((count * tiles.tokens)[split].sum(dtype=np.int64))

    def _blocks(self, tokens: float) -> int:
        return max(-int(-tokens // self.block), 1) * self.block

    def _size(self, items: int, rows: int) -> int:
        """Rounds up to one of few sizes, because a CUDA graph is captured for each. The items past the last do
        nothing."""
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
    # Only tiles that are split need memory for partial results.
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
