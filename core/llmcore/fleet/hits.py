"""The prompts that places have probably cached, as their sender remembers."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b
from itertools import compress

import numpy as np
from numpy.typing import NDArray

CHUNK = 64
"""Tokens of a chunk. A prefix is known up to its last whole chunk."""

LOST = 64
"""Lost places, beside as many as live, after which the table is swept. A sweep of a full table takes 0.3 s."""

_BYTES = CHUNK * 4
_DIGITS = bytes.maketrans(b"01", b"\x00\x01")


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
    """The chunks that each place has. It remembers the `most` chunks that were sent last."""

    def __init__(self, most: int = 1 << 20) -> None:
        self._most = most
        self._chunks: OrderedDict[int, int] = OrderedDict()
        """Chunk -> a bit for each place that has it, the least recently sent first."""
        self._numbers: dict[str, int] = {}
        """Place -> the number of its bit."""
        self._names: list[str | None] = []
        """By number; None for a place that is lost and that chunks may still name."""
        self._free: list[int] = []

    def __len__(self) -> int:
        """The chunks that it remembers."""
        return len(self._chunks)

    def sent(self, place: str, chunks: Sequence[int]) -> None:
        """A prompt with these chunks went to `place`. Its beginning is forgotten last."""
        bit, known = 1 << self._number(place), self._chunks
        for chunk in reversed(chunks):
            known[chunk] = known.get(chunk, 0) | bit
            known.move_to_end(chunk)
        while len(known) > self._most:
            known.popitem(last=False)

    def _number(self, place: str) -> int:
        number = self._numbers.get(place)
        if number is None:
            number = self._free.pop() if self._free else len(self._names)
            self._names[number : number + 1] = [place]
            self._numbers[place] = number
        return number

    def lost(self, place: str) -> None:
        """`place` is gone, or has lost its cache. It may come back, with nothing cached."""
        number = self._numbers.pop(place, None)
        if number is None:
            return
        self._names[number] = None
        if len(self._names) - len(self._free) > 2 * len(self._numbers) + LOST:
            self._sweep()

    def _sweep(self) -> None:
        """Clears the bits of lost places, so that they can be given to others."""
        kept = sum(1 << number for number in self._numbers.values())
        self._chunks = OrderedDict((chunk, bits & kept) for chunk, bits in self._chunks.items() if bits & kept)
        self._free = [number for number, name in enumerate(self._names) if name is None]

    def found(self, chunks: Sequence[int]) -> dict[str, int]:
        """The tokens at the beginning of a prompt that each place has; places that have none are left out."""
        found: dict[str, int] = {}
        having = -1
        for number, chunk in enumerate(chunks):
            still = having & self._chunks.get(chunk, 0)
            ended = having & ~still
            if number and ended:
                self._end(ended, number, found)
            having = still
            if not having:
                return found
        if chunks:
            self._end(having, len(chunks), found)
        return found

    def _end(self, bits: int, length: int, found: dict[str, int]) -> None:
        """Notes for each place of `bits` that it has `length` chunks."""
        digits = (
            f"{bits:b}"[::-1].encode().translate(_DIGITS)
        )  # a loop over bits takes ten times as long for 300 places
        for name in compress(self._names, digits):
            if name is not None:
                found[name] = length * CHUNK
