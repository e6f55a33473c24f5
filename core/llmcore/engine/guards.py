"""Policies that fail while requests run: one that raises, or says what cannot be, is dismissed, and all go on without.

A scheduling policy needs no guard here: the scheduler checks every decision itself.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from llmcore.api.counters import TALLIES
from llmcore.api.errors import reraise_if_stopping
from llmcore.api.protocols import Int32, Int64, KVManager, LengthEstimator
from llmcore.kv.group import NO_GRANULES, KVGroup

log = logging.getLogger(__name__)

P = TypeVar("P")
R = TypeVar("R")


class _Guarded(Generic[P]):
    """`policy` until it is dismissed. `name` and `kind` are what is counted then, and `news` % name is logged."""

    def __init__(self, policy: P, name: str, kind: str, news: str) -> None:
        self._policy: P | None = policy
        self._name = name
        self._kind = kind
        self._news = news

    def _ask(self, question: Callable[[P], R], otherwise: Callable[[], R]) -> R:
        """The policy's answer to `question`, which raises on answers that cannot be; else what `otherwise` says."""
        if self._policy is not None:
            try:
                return question(self._policy)
            except BaseException as error:  # noqa: BLE001 - a foreign policy may raise anything
                reraise_if_stopping(error)
                self._dismiss(error)
        return otherwise()

    def _dismiss(self, error: BaseException) -> None:
        self._policy = None
        TALLIES.count("plugin_failures", self._name, self._kind)
        log.error(self._news, self._name, exc_info=error)


class GuardedEstimator(_Guarded[LengthEstimator]):
    """A LengthEstimator; once it is dismissed, every answer is foreseen at its full length."""

    def __init__(self, estimator: LengthEstimator, name: str) -> None:
        news = "length estimator %r has failed; from now on full lengths are foreseen"
        super().__init__(estimator, name, "length_estimator", news)
        self.guaranteed = estimator.guaranteed

    def totals(self, produced: Int32, max_new: Int32, ignore_eos: NDArray[np.bool_], used: float) -> Int32:
        """LengthEstimator."""

        def checked(estimator: LengthEstimator) -> Int32:
            totals = np.asarray(estimator.totals(produced, max_new, ignore_eos, used))
            if totals.shape != produced.shape or not np.isfinite(totals).all():
                raise ValueError(f"totals() gave {totals} for {produced.size} requests")
            return totals

        return self._ask(checked, lambda: max_new)

    def observe(self, produced: int) -> None:
        """LengthEstimator."""
        self._ask(lambda estimator: estimator.observe(produced), lambda: None)


class GuardedManager(_Guarded[KVManager]):
    """The KVManager of `group`; once it is dismissed nothing enters the cache, and what is in it leaves as needed."""

    def __init__(self, group: KVGroup, name: str) -> None:
        news = "prefix cache %r has failed; from now on nothing is cached"
        super().__init__(group.manager, name, "kv_manager", news)
        self._group = group
        self.caching = group.manager.caching

    def match(self, salt: bytes, content: Int64) -> Int32:
        """KVManager."""
        return self._name_granules(lambda manager: manager.match(salt, content), lambda: NO_GRANULES, kept=True)

    def insert(self, salt: bytes, content: Int64, granules: Int32) -> Int32:
        """KVManager."""
        return self._name_granules(
            lambda manager: manager.insert(salt, content, granules), lambda: NO_GRANULES, kept=False
        )

    def remove(self, salt: bytes, content: Int64, start: int) -> Int32:
        """KVManager; once it is dismissed, all granules go, because their contents are unknown."""
        return self._name_granules(lambda manager: manager.remove(salt, content, start), self._left, kept=True)

    def evict(self, n: int, in_use: Callable[[Int32], NDArray[np.bool_]]) -> Int32:
        """KVManager."""

        def any_unused() -> Int32:
            left = self._left()
            return left[~in_use(left)][:n]

        return self._name_granules(lambda manager: manager.evict(n, in_use), any_unused, kept=True)

    def stats(self) -> Mapping[str, int]:
        """KVManager."""
        return self._ask(
            lambda manager: {name: int(value) for name, value in manager.stats().items()},
            lambda: {"granules": self._left().size, "nodes": 0},
        )

    def _name_granules(
        self, question: Callable[[KVManager], Int32], otherwise: Callable[[], Int32], *, kept: bool
    ) -> Int32:
        def checked(manager: KVManager) -> Int32:
            granules = question(manager)
            self._group.check_named(granules, kept=kept)
            return granules

        return self._ask(checked, otherwise)

    def _dismiss(self, error: BaseException) -> None:
        self.caching = False
        super()._dismiss(error)

    def _left(self) -> Int32:
        return np.flatnonzero(self._group.pool.kept).astype(np.int32)
