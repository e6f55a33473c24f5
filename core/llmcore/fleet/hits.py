"""The prompts that places have probably cached, as the one who sends them there remembers."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

CHUNK = 64
"""Tokens of a chunk. A prefix is known up to its last whole chunk."""

_BYTES = CHUNK * 4


def chunks_of(ids: NDArray[np.int32], salt: bytes = b"") -> list[int]:
    """A number for each whole chunk of `ids`, which stands for the chunk and all before it.

    `salt`: requests with different salts share no prefix.
    """
    packed, hashed, found = np.ascontiguousarray(ids, "<i4").tobytes(), blake2b(salt, digest_size=8), []
    for start in range(0, len(packed) - _BYTES + 1, _BYTES):
        hashed.update(packed[start : start + _BYTES])
        found.append(int.from_bytes(hashed.copy().digest(), "little"))
    return found


class Hits:
    """Which places have which chunks. It remembers the `most` chunks that were sent last."""

    def __init__(self, most: int = 1 << 20) -> None:
        self._most = most
        self._places: OrderedDict[int, int] = OrderedDict()
        """Chunk -> a bit for each place that has it."""
        self._bits: dict[str, int] = {}
        self._used = 0

    def sent(self, place: str, chunks: Iterable[int]) -> None:
        """A prompt with these chunks went to `place`."""
        bit = self._bits.get(place)
        if bit is None:
            bit = self._bits[place] = 1 << self._used
            self._used += 1
        places = self._places
        for chunk in chunks:
            places[chunk] = places.get(chunk, 0) | bit
            places.move_to_end(chunk)
        while len(places) > self._most:
            places.popitem(last=False)

    def lost(self, place: str) -> None:
        """`place` is gone, or has lost its cache. Its bit is not used again, because chunks keep it."""
        self._bits.pop(place, None)

    def found(self, chunks: Sequence[int]) -> dict[str, int]:
        """The tokens at the beginning of a prompt that each place has; places that have none are left out."""
        having, ends = -1, []
        for number, chunk in enumerate(chunks):
            still = having & self._places.get(chunk, 0)
            if still != having and number:
                ends.append((having & ~still, number))
            having = still
            if not having:
                break
        else:
            if chunks:
                ends.append((having, len(chunks)))
        return {place: length * CHUNK for place, bit in self._bits.items() for bits, length in ends if bits & bit}
