"""Cuts a prefill step into tiles, on the host and without torch."""

from __future__ import annotations

import numpy as np
from llmcore.api import AttnRows
from numpy.typing import NDArray

Int32 = NDArray[np.int32]


def count_tiles(n_query: Int32, tokens: int) -> int:
    """Returns the number of tiles of `tokens` query tokens. A tile belongs to one row."""
    return int((-(-n_query // tokens)).sum())


def tiles_of(rows: AttnRows, tokens: int, window: int | None = None) -> Int32:
    """Returns (row, tile of the row) of every tile, [2 * tiles] int32. Tiles with most keys come first.

    The device starts programs in order. With the longest first, none runs alone at the end.
    """
    counts = -(-rows.n_query // tokens)
    row = np.repeat(np.arange(counts.size, dtype=np.int32), counts)
    index = np.arange(row.size, dtype=np.int32) - (np.cumsum(counts, dtype=np.int32) - counts)[row]
    unseen = np.maximum(rows.n_query[row] - (index + 1) * tokens, 0)
    keys = rows.kv_len[row] - unseen
    if window is not None:
        keys = np.minimum(keys, window + tokens)
    order = np.argsort(-keys)
    tiles: Int32 = np.empty((row.size, 2), np.int32)
    tiles[:, 0], tiles[:, 1] = row[order], index[order]
    return tiles.reshape(-1)
