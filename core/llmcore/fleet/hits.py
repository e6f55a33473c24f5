"""The prompts that places have probably cached, as their sender knows."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b
from itertools import compress

import numpy as np
from numpy.typing import NDArray

CHUNK = 64
"""Tokens of a chunk. A prefix is known up to its last whole chunk."""

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
    """The chunks that each place has: those that were sent there last, as many as its KV cache holds.

    A place whose KV cache is not known, or is larger than its share of `most` chunks, gets that share.
    """

    def __init__(self, most: int = 1 << 20) -> None:
        self._most = most
        self._places: dict[int, int] = {}
        """Chunk -> a bit for each place that has it."""
        self._chunks: dict[str, OrderedDict[int, None]] = {}
        """Place -> its chunks, the least recently sent first."""
        self._numbers: dict[str, int] = {}
        """Place -> the number of its bit."""
        self._names: list[str] = []
        """By number. The name of a place that is lost stays until another place gets its number."""
        self._free: list[int] = []

    def __len__(self) -> int:
        """The chunks that it remembers."""
        return len(self._places)

    def sent(self, place: str, chunks: Sequence[int], kv: int = 0) -> None:
        """A prompt with these chunks went to `place`, whose KV cache holds `kv` tokens (0: not known). The prompt's
        beginning is forgotten last, as a prefix cache evicts it last."""
        bit, mine, places = 1 << self._number(place), self._chunks[place], self._places
        for chunk in reversed(chunks):
            if chunk in mine:
                mine.move_to_end(chunk)
            else:
                mine[chunk] = None
                places[chunk] = places.get(chunk, 0) | bit
        share = max(1, self._most // len(self._chunks))
        most = min(kv // CHUNK or share, share)
        while len(mine) > most:
            self._forget(mine.popitem(last=False)[0], bit)

    def _number(self, place: str) -> int:
        number = self._numbers.get(place)
        if number is None:
            number = self._free.pop() if self._free else len(self._names)
            self._names[number : number + 1] = [place]
            self._numbers[place] = number
            self._chunks[place] = OrderedDict()
        return number

    def lost(self, place: str) -> None:
        """`place` is gone, or has lost its cache. It may come back, with nothing cached."""
        number = self._numbers.pop(place, None)
        if number is None:
            return
        for chunk in self._chunks.pop(place):
            self._forget(chunk, 1 << number)
        self._free.append(number)

    def _forget(self, chunk: int, bit: int) -> None:
        """The place of `bit`, which has the chunk, has it no more."""
        left = self._places[chunk] ^ bit
        if left:
            self._places[chunk] = left
        else:
            del self._places[chunk]

    def found(self, chunks: Sequence[int]) -> dict[str, int]:
        """The tokens at the beginning of a prompt that each place has; places that have none are left out."""
        found: dict[str, int] = {}
        having = -1
        for number, chunk in enumerate(chunks):
            still = having & self._places.get(chunk, 0)
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
            found[name] = length * CHUNK
