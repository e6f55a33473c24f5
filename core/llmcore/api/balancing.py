"""Balancers: they choose one of several engines, or of several servers, for a request.

All lengths count tokens. A caller that knows no token ids counts four bytes of text as one token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

__all__ = ["Arrival", "Balancer", "Candidate"]


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request that needs a place."""

    tokens: int
    """The length of its prompt."""
    key: int
    """A hash of the prompt's first tokens. Requests that begin alike have the same."""


@dataclass(slots=True)
class Candidate:
    """A place that may take the request, as far as the caller knows. Requests that it has sent there count at once.

    It is the caller's, which may change it after the choice: a balancer reads it and does not keep it.
    """

    name: str
    """The place's name, which stays the same while it lives."""
    waiting: int = 0
    """Tokens of prompts that the place has still to compute, without those in its prefix cache."""
    requests: int = 0
    """Requests that wait or run there."""
    kv_live: int = 0
    """Tokens in its KV cache that running requests use."""
    kv_total: int = 0
    """Tokens that its KV cache holds; 0 if unknown."""
    hit: int = 0
    """Tokens at the beginning of the prompt that its prefix cache holds."""
    speed: float = 1.0
    """Its speed beside the others', as its operator says."""
    latency: float = 0.0
    """The mean seconds of its last answers; 0 before the first."""


class Balancer(Protocol):
    """Chooses a place. A caller has one balancer, and asks it on one thread at a time."""

    def choose(self, arrival: Arrival, candidates: Sequence[Candidate]) -> int:
        """The index of the place that gets the request. There is at least one candidate, and all of them may take
        it."""
