"""Policies that fail while requests run: one that raises, or says what cannot be, is dismissed, and all go on without.

A scheduling policy needs no guard here: the scheduler checks every decision itself.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

from llmcore.kv.group import NO_GRANULES, KVGroup
from llmcore.protocols import Int32, Int64, KVManager, LengthEstimator
from llmcore.tallies import TALLIES

log = logging.getLogger(__name__)


class GuardedEstimator:
    """A LengthEstimator; once it is dismissed, every answer is foreseen at its full length."""

    def __init__(self, estimator: LengthEstimator, name: str) -> None:
        self.guaranteed = estimator.guaranteed
        self._estimator: LengthEstimator | None = estimator
        self._name = name

    def totals(self, produced: Int32, max_new: Int32, ignore_eos: NDArray[np.bool_], used: float) -> Int32:
        """LengthEstimator."""
        if self._estimator is not None:
            try:
                totals = np.asarray(self._estimator.totals(produced, max_new, ignore_eos, used))
                if totals.shape != produced.shape or not np.isfinite(totals).all():
                    raise ValueError(f"totals() gave {totals} for {produced.size} requests")
                return totals
            except Exception as error:  # noqa: BLE001 - a foreign policy may raise anything
                self._dismiss(error)
        return max_new

    def observe(self, produced: int) -> None:
        """LengthEstimator."""
        if self._estimator is not None:
            try:
                self._estimator.observe(produced)
            except Exception as error:  # noqa: BLE001 - a foreign policy may raise anything
                self._dismiss(error)

    def _dismiss(self, error: Exception) -> None:
        self._estimator = None
        TALLIES.count("plugin_failures", self._name, "length_estimator")
        what = "length estimator %r has failed; from now on full lengths are foreseen"
        log.error(what, self._name, exc_info=error)


class GuardedManager:
    """The KVManager of `group`; once it is dismissed nothing enters the cache, and what is in it leaves as needed."""

    def __init__(self, group: KVGroup, name: str) -> None:
        self._group = group
        self.caching = group.manager.caching
        self._manager: KVManager | None = group.manager
        self._name = name

    def match(self, salt: bytes, content: Int64) -> Int32:
        """KVManager."""
        return self._ask(lambda manager: manager.match(salt, content), lambda: NO_GRANULES, kept=True)

    def insert(self, salt: bytes, content: Int64, granules: Int32) -> Int32:
        """KVManager."""
        return self._ask(lambda manager: manager.insert(salt, content, granules), lambda: NO_GRANULES, kept=False)

    def remove(self, salt: bytes, content: Int64, start: int) -> Int32:
        """KVManager; nobody can say any more which granules hold what, so all of them go."""
        return self._ask(lambda manager: manager.remove(salt, content, start), self._left, kept=True)

    def evict(self, n: int, in_use: Callable[[Int32], NDArray[np.bool_]]) -> Int32:
        """KVManager."""

        def any_unused() -> Int32:
            left = self._left()
            return left[~in_use(left)][:n]

        return self._ask(lambda manager: manager.evict(n, in_use), any_unused, kept=True)

    def stats(self) -> Mapping[str, int]:
        """KVManager."""
        if self._manager is not None:
            try:
                return {name: int(value) for name, value in self._manager.stats().items()}
            except Exception as error:  # noqa: BLE001 - a foreign policy may raise anything
                self._dismiss(error)
        return {"granules": self._left().size, "nodes": 0}

    def _ask(self, ask: Callable[[KVManager], Int32], otherwise: Callable[[], Int32], *, kept: bool) -> Int32:
        if self._manager is not None:
            try:
                granules = ask(self._manager)
                self._group.check_named(granules, kept=kept)
                return granules
            except Exception as error:  # noqa: BLE001 - a foreign policy may raise anything
                self._dismiss(error)
        return otherwise()

    def _dismiss(self, error: Exception) -> None:
        self._manager, self.caching = None, False
        TALLIES.count("plugin_failures", self._name, "kv_manager")
        log.error("prefix cache %r has failed; from now on nothing is cached", self._name, exc_info=error)

    def _left(self) -> Int32:
        return np.flatnonzero(self._group.pool.kept).astype(np.int32)
