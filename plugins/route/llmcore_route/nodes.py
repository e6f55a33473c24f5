"""The nodes: what each one serves, how it does, and which one gets a request."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from llmcore.api import RequestError
from llmcore.api.balancing import Arrival, Balancer
from llmcore.fleet.destinations import Destination, Stay
from llmcore.fleet.hits import Hits

from llmcore_route.addresses import Place
from llmcore_route.prompts import Wish

logger = logging.getLogger(__name__)

FAILURES = 2
"""Failures in a row that take a node out. One success takes it in."""

RETRY_SECONDS = 2
"""Seconds after which a client may try again where no node is up."""

FIGURES = ("running", "waiting", "waiting_tokens", "kv_live", "kv_total")
"""The figures of `llmcore.api.Load` that count here."""

HYBRID = 1
"""LMDeploy's role of a node that both reads prompts and answers."""

LATEST = ":latest"
"""Ollama's clients add it to names."""


@dataclass(eq=False)
class Node(Destination):
    """A server. Only `Nodes` changes it."""

    url: str
    place: Place
    models: tuple[str, ...]
    speed: float | None = None
    up: bool = False
    failures: int = 0
    added: float = field(default_factory=time.time)
    removed: bool = False
    wake: threading.Event = field(default_factory=threading.Event)
    """Set to have the node's health asked for now."""
    checked: threading.Event = field(default_factory=threading.Event)

    def serves(self, model: str | None) -> bool:
        """True if the node has the model; any node serves a request that names none."""
        return model is None or model in self.models or model.removesuffix(LATEST) in self.models

    def status(self) -> dict[str, Any]:
        """LMDeploy's Status, and whether the node gets requests."""
        return {
            "role": HYBRID,
            "models": list(self.models),
            "unfinished": self.requests,
            "latency": [round(seconds, 6) for seconds in self.latencies],
            "speed": self.speed,
            "ready": self.up,
        }


class Nodes:
    """All nodes, for any thread. No call blocks. `balancer` chooses, under the lock."""

    def __init__(self, balancer: Balancer) -> None:
        self._balancer = balancer
        self._nodes: dict[str, Node] = {}
        self._removed: set[str] = set()
        """The URLs of nodes that were removed and not added again."""
        self._hits = Hits()
        self._closed = False
        self._lock = threading.Lock()

    def add(self, node: Node) -> Node:
        """Add a node, or change what is known of the one with its URL. The node that counts from now on."""
        with self._lock:
            known = self._nodes.setdefault(node.url, node)
            self._removed.discard(node.url)
            known.models, known.speed = node.models, node.speed
            if known is not node:  # it has started again, perhaps
                known.checked.clear()
                known.wake.set()
        logger.info("node %s serves %s", node.url, ", ".join(node.models))
        return known

    def remove(self, url: str) -> bool:
        """Send nothing more to a node; requests there go on. False if there is none with this URL."""
        with self._lock:
            node = self._nodes.pop(url, None)
            self._hits.lost(url)
            if node is None:
                return False
            self._removed.add(url)
        node.removed = True
        node.wake.set()
        logger.info("node %s is removed", url)
        return True

    def status(self) -> dict[str, dict[str, Any]]:
        """URL -> LMDeploy's Status."""
        with self._lock:
            return {url: node.status() for url, node in self._nodes.items()}

    def status_of(self, url: str) -> dict[str, dict[str, Any] | None]:
        """The same of one node: empty if there never was one with this URL, None as its status if it was removed."""
        with self._lock:
            node = self._nodes.get(url)
            if node is not None:
                return {url: node.status()}
            return {url: None} if url in self._removed else {}

    def models(self) -> dict[str, int]:
        """Every model, in the order of their names -> the second since 1970 in which its first node was added."""
        with self._lock:
            nodes = list(self._nodes.values())
        found: dict[str, int] = {}
        for node in nodes:
            for name in node.models:
                found[name] = min(int(node.added), found.get(name, int(node.added)))
        return dict(sorted(found.items()))

    @property
    def ready(self) -> bool:
        """True if a node is up, and requests are taken."""
        with self._lock:
            return not self._closed and any(node.up for node in self._nodes.values())

    def close(self) -> None:
        """Take no more requests, because the router ends."""
        with self._lock:
            self._closed = True

    def take(self, wish: Wish, without: Collection[Node] = ()) -> Stay[Node]:
        """A place for a request, at none of `without`. Raises RequestError: 404 if no node has the model, 503 if none
        of those that have it is up."""
        with self._lock:
            if self._closed:
                raise ending()
            able = [node for node in self._nodes.values() if node.serves(wish.model)]
            if self._nodes and not able:
                raise self._unknown(wish)
            ready = [node for node in able if node.up and node not in without]
            if not ready:
                raise none_ready(wish.model)
            hits = self._hits.found(wish.chunks)
            node = ready[self._chosen(wish.arrival, ready, hits)]
            self._hits.sent(node.url, wish.chunks, node.kv_total)
            return Stay(node, max(0, wish.arrival.tokens - hits.get(node.url, 0)), self._lock)

    def succeeded(self, node: Node, load: Mapping[str, float] | None = None) -> None:
        """A node has answered as a healthy one does. `load`: the figures of an llmcore server."""
        self._judge(node, lambda: (0, True))
        if load is None:
            return
        told = {name: int(load.get(name, 0)) for name in FIGURES}
        with self._lock:
            requests = told["running"] + told["waiting"]
            node.told(requests, told["waiting_tokens"], (told["kv_live"], told["kv_total"]))

    def failed(self, node: Node, why: str) -> None:
        """A node has not."""
        self._judge(node, lambda: (node.failures + 1, node.up and node.failures + 1 < FAILURES), why)

    def _judge(self, node: Node, verdict: Callable[[], tuple[int, bool]], why: str = "") -> None:
        with self._lock:
            before = node.up
            node.failures, node.up = verdict()
            after = node.up
            if before and not after:  # whatever comes back there begins with an empty cache
                self._hits.lost(node.url)
        if after and not before:
            logger.info("node %s is up", node.url)
        elif before and not after:
            logger.warning("node %s is out: %s", node.url, why)

    def _chosen(self, arrival: Arrival, ready: list[Node], hits: Mapping[str, int]) -> int:
        declared = [node.speed for node in ready if node.speed is not None]
        usual = sum(declared) / len(declared) if declared else 1.0
        speeds = [1.0 if node.speed is None else node.speed / usual for node in ready]
        candidates = [
            node.candidate(node.url, hits.get(node.url, 0), speed) for node, speed in zip(ready, speeds, strict=True)
        ]
        return self._balancer.choose(arrival, candidates)

    def _unknown(self, wish: Wish) -> RequestError:
        known = sorted({name for node in self._nodes.values() for name in node.models})
        return RequestError(
            f"No node serves the model {str(wish.model)[:100]!a}; there are {', '.join(known)}.",
            param="model",
            code="model_not_found",
            status=404,
        )


def ending() -> RequestError:
    """The error of a router that is told to stop."""
    return RequestError("The router is shutting down; try again.", code="server_overloaded", status=503)


def none_ready(model: str | None) -> RequestError:
    """The error where every node that could answer is out."""
    what = "No node" if model is None else f"No node that serves {model[:100]!a}"
    text = f"{what} is up; try again, or see GET /nodes/status."
    return RequestError(text, code="server_overloaded", status=503, retry_after=RETRY_SECONDS)
