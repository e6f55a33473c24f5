"""The router's own paths: /nodes/* with LMDeploy's bodies and answers, health, the list of models."""

from __future__ import annotations

from typing import Any

import falcon
import msgspec
import orjson
from llmcore.api import RequestError
from llmcore_server.listening import Route, no_route

from llmcore_route.addresses import Allowed, check, place_of
from llmcore_route.door import is_admin
from llmcore_route.health import Health
from llmcore_route.nodes import HYBRID, Node, Nodes
from llmcore_route.upstream import Unanswered

CHECK_SECONDS = 1.0
"""The longest time that POST /nodes/add waits for the node's first answer. LMDeploy's servers register before they
answer anything."""

ROLES = (None, HYBRID, "Hybrid", "hybrid")
"""LMDeploy's names for a node that both reads prompts and answers."""


class Status(msgspec.Struct):
    """The facts that a node sends. The router counts two of LMDeploy's fields itself: `unfinished` and `latency`."""

    models: list[str] | None = None
    role: int | str | None = None
    speed: float | None = None


class NodeBody(msgspec.Struct):
    """The body of POST /nodes/add and /nodes/remove."""

    url: str
    status: Status | None = None


class Administration:
    """The resource of a path of /nodes/*. `by_address`: no admin key is set, so the client's address decides."""

    def __init__(self, nodes: Nodes, allowed: Allowed, health: Health, *, by_address: bool) -> None:
        self.nodes, self.allowed, self.health = nodes, allowed, health
        self._by_address = by_address

    def check_client(self, req: falcon.Request) -> None:
        """Raises RequestError (403) for a client that may not change nodes."""
        if self._by_address and not self.allowed.client(req.remote_addr):
            raise RequestError(
                f"{req.remote_addr} is not listed in --route_nodes; list it, or set --admin_key and send that.",
                status=403,
            )

    def body(self, req: falcon.Request) -> NodeBody:
        """The body of a request. Raises RequestError (400)."""
        try:
            return msgspec.json.decode(req.bounded_stream.read(), type=NodeBody)
        except msgspec.MsgspecError as error:
            raise RequestError(f'the body is {{"url": "http://HOST:PORT"}}, {error}', code="invalid_json") from error


class Add(Administration):
    """Adds a node, or changes what is known of it."""

    def on_post(self, req: falcon.Request, resp: falcon.Response) -> None:
        """200 "Added successfully". A node without declared models is asked for them."""
        self.check_client(req)
        asked = self.body(req)
        status = asked.status or Status()
        if status.role not in ROLES:
            raise RequestError(
                f"status.role: {status.role!r} is not available: prefill and decode are not split over servers; start "
                "the node with --role Hybrid.",
                param="status.role",
            )
        place = place_of(asked.url)
        check(place, self.allowed)
        speed = status.speed if status.speed is not None and status.speed > 0 else None  # LMDeploy: -1 for unknown
        node = Node(asked.url.rstrip("/"), place, tuple(status.models or ()), speed)
        if not node.models:
            try:
                node.models = self.health.models(node)
            except Unanswered as error:
                raise RequestError(
                    f"Failed to add, please check the input url: the node does not say its models ({error}).",
                    param="url",
                ) from error
        known = self.nodes.add(node)
        if known is node:
            self.health.watch(node)
        known.checked.wait(CHECK_SECONDS)
        answer(resp, "Added successfully")


class Remove(Administration):
    """Removes a node. Requests that are there go on."""

    def on_post(self, req: falcon.Request, resp: falcon.Response) -> None:
        """200 "Deleted successfully", 404 for an unknown URL. Old clients send the URL as `node_url` in the query."""
        self.check_client(req)
        url = req.get_param("node_url") or self.body(req).url
        if not self.nodes.remove(url.rstrip("/")):
            raise RequestError(
                "Failed to delete, please check the input url: GET /nodes/status lists the nodes.",
                param="url",
                status=404,
            )
        answer(resp, "Deleted successfully")


class Listed(Administration):
    """The nodes."""

    def on_get(self, req: falcon.Request, resp: falcon.Response) -> None:
        """URL -> its status; with `?url=` as `Nodes.status_of`, by which a server sees whether it has to register
        again."""
        self.check_client(req)
        url = req.get_param("url")
        answer(resp, self.nodes.status() if url is None else self.nodes.status_of(url.rstrip("/")))


class Models:
    """The models of all nodes, as OpenAI's list."""

    def __init__(self, nodes: Nodes) -> None:
        self._nodes = nodes

    def on_get(self, req: falcon.Request, resp: falcon.Response) -> None:
        """Every model once."""
        models = [
            {"id": name, "object": "model", "created": created, "owned_by": "llmcore", "root": name}
            for name, created in self._nodes.models().items()
        ]
        answer(resp, {"object": "list", "data": models})


class Liveness:
    """200 while the router runs."""

    def on_get(self, req: falcon.Request, resp: falcon.Response) -> None:
        """Always 200."""
        answer(resp, {"status": "ok"})


class Readiness:
    """The answer to the question whether to send requests here."""

    def __init__(self, nodes: Nodes) -> None:
        self._nodes = nodes

    def on_get(self, req: falcon.Request, resp: falcon.Response) -> None:
        """200 while a node is up, else 503."""
        ready = self._nodes.ready
        resp.status = falcon.HTTP_200 if ready else falcon.HTTP_503
        answer(resp, {"status": "ok"} if ready else {"status": "error", "reason": "no node is up"})


def routes(nodes: Nodes, allowed: Allowed, health: Health, *, by_address: bool) -> list[Route]:
    """All that the router answers itself."""
    ready = Readiness(nodes)
    table: dict[str, object] = {
        "/nodes/add": Add(nodes, allowed, health, by_address=by_address),
        "/nodes/remove": Remove(nodes, allowed, health, by_address=by_address),
        "/nodes/status": Listed(nodes, allowed, health, by_address=by_address),
        "/v1/models": Models(nodes),
        "/liveness": Liveness(),
        **{path: ready for path in ("/health", "/healthz", "/ping", "/readiness")},
    }
    return [Route(path, resource) for path, resource in table.items()]


def refuse_unknown(req: falcon.Request) -> None:
    """Raises RequestError (404) for a path below /nodes that the router does not have."""
    if is_admin(req.path):
        raise no_route(req.method, req.path, "/nodes/add, /nodes/remove and /nodes/status")


def answer(resp: falcon.Response, value: Any) -> None:
    """Answer with `value` as JSON."""
    resp.content_type = "application/json"
    resp.data = orjson.dumps(value)
