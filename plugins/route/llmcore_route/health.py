"""Health of the nodes: each has a thread that asks it every few seconds, so one that hangs delays no other."""

from __future__ import annotations

import threading
from collections.abc import Mapping

import orjson

from llmcore_route.nodes import Node, Nodes
from llmcore_route.upstream import Call, Exchange, Unanswered, whole

PATHS = ("/health", "/ready")
"""The paths of health. A node that does not know the first is asked for the second."""

LOAD_PATH = "/server_info"
"""The path at which an llmcore server tells its load."""

EAGER_SECONDS = 0.5
"""Seconds between two questions until a node has answered for the first time: it may be about to start."""

ANSWER_BYTES = 1 << 20


class Health:
    """Watches nodes. `interval`: seconds between two questions. `timeout`: seconds that an answer may take."""

    def __init__(self, nodes: Nodes, interval: float, timeout: float, key: str | None) -> None:
        self._nodes, self._interval, self._timeout, self._key = nodes, interval, timeout, key

    def watch(self, node: Node) -> None:
        """Ask `node` from now on, until it is removed."""
        threading.Thread(target=self._watch, args=(node,), name="health", daemon=True).start()

    def models(self, node: Node) -> tuple[str, ...]:
        """The models that a node lists itself. Raises Unanswered."""
        status, body = self._get(node, "/v1/models")
        try:
            found = tuple(str(model["id"]) for model in orjson.loads(body)["data"])
        except (orjson.JSONDecodeError, KeyError, TypeError) as error:
            raise Unanswered(f"/v1/models answers {status} without a list of models") from error
        if not found:
            raise Unanswered("/v1/models lists no model")
        return found

    def _watch(self, node: Node) -> None:
        pause = min(EAGER_SECONDS, self._interval)
        tells_load = True
        while not node.removed:
            try:
                self._ask(node)
                load = self._load(node) if tells_load else None
                tells_load = load is not None
                self._nodes.succeeded(node, load)
                pause = self._interval
            except Unanswered as error:
                self._nodes.failed(node, str(error))
            node.checked.set()
            node.wake.wait(pause)
            node.wake.clear()

    def _ask(self, node: Node) -> None:
        for path in PATHS:
            status, _ = self._get(node, path)
            if status == 200:
                return
            if status != 404:
                break
        raise Unanswered(f"{path} answers {status}")

    def _load(self, node: Node) -> Mapping[str, float] | None:
        """The figures of an llmcore server, None from any other."""
        try:
            _, body = self._get(node, LOAD_PATH)
            load = orjson.loads(body)["load"]
            return {name: float(value) for name, value in load.items()}
        except (Unanswered, orjson.JSONDecodeError, KeyError, TypeError, ValueError, AttributeError):
            return None

    def _get(self, node: Node, path: str) -> tuple[int, bytes]:
        exchange = Exchange(node.place, self._key)
        try:
            response = exchange.open(Call("GET", path, (("Accept", "application/json"),), b""), self._timeout)
            return response.status, whole(response, ANSWER_BYTES)
        finally:
            exchange.close()
