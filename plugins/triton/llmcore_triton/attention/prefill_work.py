"""How a prefill step is cut into tiles, on the host and without torch."""

from __future__ import annotations

import numpy as np
from llmcore.api import AttnRows
from numpy.typing import NDArray

Int32 = NDArray[np.int32]


def count_tiles(n_query: Int32, tokens: int) -> int:
    """How many tiles of `tokens` query tokens the rows are cut into; a tile belongs to one row."""
    return int((-(-n_query // tokens)).sum())


def tiles_of(rows: AttnRows, tokens: int, window: int | None = None) -> Int32:
    """[2 * tiles] int32: (row, tile of the row) of every tile, those with most keys first.

    The device starts programs in order: with the longest first, none is left to run alone at the end.
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
