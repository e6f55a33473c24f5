"""The most slots that a set of requests will hold at once, from now until the last of them ends."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from llmcore.protocols import Int32, Int64


@dataclass(frozen=True)
class FuturePeak:
    """Requests by how long they will still run, the longest first: columns over requests, all counts in slots.

    `own[i]` is what request i alone holds now, `growth[i]` what it will add until it ends, one slot a step.
    `shared` is what several hold together; it may live as long as any of them. When the k-th ends, exactly the
    k longest are there and each has grown by the k-th's growth, so the peak is the maximum over k of
    shared + sum(own[:k]) + k * growth[k - 1]. `row[i]` tells requests apart.
    """

    row: Int32
    own: Int32
    growth: Int32
    shared: int

    @staticmethod
    def of(row: Int32, own: Int32, growth: Int32, shared: int) -> FuturePeak:
        """The same from columns in any order."""
        order = np.argsort(-growth, kind="stable")
        return FuturePeak(row[order], own[order], growth[order], shared)

    @property
    def peak(self) -> int:
        """The maximum; `shared` where nothing runs."""
        if not self.own.size:
            return self.shared
        count: Int64 = np.arange(1, self.own.size + 1)
        return self.shared + int((np.cumsum(self.own, dtype=np.int64) + count * self.growth).max())

    def share(self, owners: Int32) -> FuturePeak:
        """One slot of each of `owners` (a row per slot) becomes shared."""
        if not owners.size:
            return self
        given = np.bincount(owners, minlength=int(self.row.max(initial=-1)) + 1)[self.row]
        return FuturePeak(self.row, (self.own - given).astype(np.int32), self.growth, self.shared + owners.size)

    def add(self, row: Int32, own: Int32, growth: int) -> FuturePeak:
        """With more requests that all grow alike (the choices of one)."""
        at = int(np.searchsorted(-self.growth, -growth, side="right"))
        return FuturePeak(
            np.concatenate([self.row[:at], row, self.row[at:]]),
            np.concatenate([self.own[:at], own, self.own[at:]]),
            np.concatenate([self.growth[:at], np.full(row.size, growth, np.int32), self.growth[at:]]),
            self.shared,
        )
