"""Estimators of answer length: from recent answers, with a cap, or the literal max_new_tokens."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from llmcore.api import LengthEstimatorSpec, hookimpl
from llmcore.api.sched import Int32, SchedulerLimits

HISTORY = 1000
"""Number of finished answers that count as recent."""

ENOUGH = 16
"""Number of finished answers from which on their distribution is used."""

SEED = 0x5EED


class Conservative:
    """The literal max_new_tokens: an upper bound, so the scheduler never has to preempt an admitted request."""

    guaranteed = True

    def __init__(self, limits: SchedulerLimits) -> None:
        del limits

    def totals(self, produced: Int32, max_new: Int32, ignore_eos: NDArray[np.bool_], used: float) -> Int32:
        """`max_new` itself."""
        return max_new

    def observe(self, produced: int) -> None:
        """Does nothing."""


class Capped:
    """min(max_new_tokens, max(1.1 x produced, router_max_new_token_len)), as LightLLM's router estimates it.

    It is max_new_tokens for requests that ignore eos, and for all when `token_ratio` of the KV cache is in use.
    """

    guaranteed = False

    def __init__(self, limits: SchedulerLimits) -> None:
        self._cap = limits.capped_new_tokens
        self._ratio = limits.token_ratio

    def totals(self, produced: Int32, max_new: Int32, ignore_eos: NDArray[np.bool_], used: float) -> Int32:
        """The estimated length of each answer, in tokens. `used`: the share of the KV cache in use, 0 to 1."""
        if self._ratio is not None and used >= self._ratio:
            return max_new
        grown = np.maximum(produced * 11 // 10, self._cap)
        totals: Int32 = np.where(ignore_eos, max_new, np.clip(grown, produced + 1, max_new)).astype(np.int32)
        return totals

    def observe(self, produced: int) -> None:
        """Does nothing."""


class PastFuture:
    """A random draw from the lengths of recent answers that were longer than this answer is now.

    The idea comes from the Past-Future scheduler (arXiv:2507.10150): over many requests, the drawn lengths add up to
    the tokens that will be needed. So the scheduler reserves neither the literal limits nor a guess. Without enough
    history, and for an answer longer than all recent ones, the estimate is that of `Capped`. The generator is seeded:
    equal sequences of calls give equal lengths.
    """

    guaranteed = False

    def __init__(self, limits: SchedulerLimits) -> None:
        self._capped = Capped(limits)
        self._recent = np.empty(HISTORY, np.int32)
        self._observed = 0
        self._sorted: Int32 | None = None
        self._random = np.random.default_rng(SEED)

    def totals(self, produced: Int32, max_new: Int32, ignore_eos: NDArray[np.bool_], used: float) -> Int32:
        """One draw for each request from the recent lengths above `produced`, at most `max_new`."""
        if self._observed < ENOUGH:
            return self._capped.totals(produced, max_new, ignore_eos, used)
        if self._sorted is None:
            self._sorted = np.sort(self._recent[: self._observed])
        low = self._sorted.searchsorted(produced, side="right")
        longer = self._sorted.size - low
        pick = low + (self._random.random(produced.size) * longer).astype(np.int64)
        totals: Int32 = np.minimum(self._sorted.take(pick, mode="clip"), max_new)
        unknown = ignore_eos | (longer == 0)
        if unknown.any():
            capped = self._capped.totals(produced[unknown], max_new[unknown], ignore_eos[unknown], used)
            totals[unknown] = capped
        return totals

    def observe(self, produced: int) -> None:
        """Add a finished answer of `produced` tokens to the history."""
        self._recent[self._observed % HISTORY] = produced
        self._observed += 1
        self._sorted = None


@hookimpl
def register_length_estimators() -> Iterable[LengthEstimatorSpec]:
    """The three values of `--length_estimator`."""
    yield LengthEstimatorSpec(
        name="past_future", make=f"{__name__}:PastFuture", summary="drawn from the recent answers' lengths"
    )
    yield LengthEstimatorSpec(
        name="capped", make=f"{__name__}:Capped", summary="max_new_tokens up to router_max_new_token_len"
    )
    yield LengthEstimatorSpec(
        name="conservative", make=f"{__name__}:Conservative", summary="max_new_tokens: nothing is ever preempted"
    )
