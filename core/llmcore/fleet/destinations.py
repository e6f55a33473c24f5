"""Destinations: the places that requests are sent to, as far as the sender knows."""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from llmcore.api.balancing import Arrival, Candidate

KEY_TOKENS = 256
"""Tokens of a prompt's beginning by which requests are alike."""

LATENCIES = 15
"""The last answers whose seconds count, as in LMDeploy."""


def arrival_of(ids: NDArray[np.int32], salt: bytes = b"") -> Arrival:
    """The arrival of a request with the prompt `ids`. `salt`: requests with different salts are not alike."""
    key = blake2b(ids[:KEY_TOKENS].tobytes(), digest_size=8, key=salt[:64]).digest()
    return Arrival(tokens=len(ids), key=int.from_bytes(key))


@dataclass(eq=False, kw_only=True)
class Destination:
    """A place that requests are sent to.

    `requests`: those that are there from here. `waiting`: the tokens of their prompts that it has still to compute.
    `kept`: the tokens that their prompts add to its KV cache. `others`: the same three numbers of what others have
    sent there, as far as it or they tell.
    """

    requests: int = 0
    waiting: int = 0
    kept: int = 0
    latencies: deque[float] = field(default_factory=lambda: deque(maxlen=LATENCIES))
    others: tuple[int, int, int] = (0, 0, 0)
    kv_total: int = 0
    """Tokens that its KV cache holds; 0 if it does not tell."""

    def told(self, requests: int, waiting: int, kv: tuple[int, int]) -> None:
        """It tells of all its requests, of the prompt tokens of those that wait, and of its KV, live and all."""
        live, self.kv_total = kv
        self.others = max(0, requests - self.requests), max(0, waiting - self.waiting), max(0, live - self.kept)

    def shared(self, tokens: int) -> None:
        """Another sender has sent a request there, with `tokens` to compute. It counts until the place tells."""
        requests, waiting, kept = self.others
        self.others = requests + 1, waiting + tokens, kept + tokens

    def candidate(self, name: str, hit: int, speed: float = 1.0) -> Candidate:
        """It, for a balancer. Requests sent from here count at once, others when it tells of them."""
        requests, waiting, kept = self.others
        return Candidate(
            name=name,
            waiting=self.waiting + waiting,
            requests=self.requests + requests,
            kv_live=self.kept + kept,
            kv_total=self.kv_total,
            hit=hit,
            speed=speed,
            latency=sum(self.latencies) / len(self.latencies) if self.latencies else 0.0,
        )


D = TypeVar("D", bound=Destination)


class Stay(Generic[D]):
    """A request's time at a destination, `at`. It is made while `lock` is held, and used by one thread at a time.

    `tokens`: those of its prompt that have still to be computed there.
    """

    def __init__(self, at: D, tokens: int, lock: threading.Lock) -> None:
        self.at = at
        self._tokens = self._kept = tokens
        self._lock = lock
        self._began = time.monotonic()
        at.requests += 1
        at.waiting += tokens
        at.kept += tokens

    def answered(self) -> None:
        """The first part of the answer is here, so the prompt is computed."""
        with self._lock:
            self.at.waiting -= self._tokens
            self._tokens = 0

    def leave(self, *, whole: bool) -> None:
        """The request is over. `whole`: it was answered to its end, so its time says something of the place."""
        with self._lock:
            self.at.waiting -= self._tokens
            self._tokens = 0
            self.at.requests -= 1
            self.at.kept -= self._kept
            if whole:
                self.at.latencies.append(time.monotonic() - self._began)
