"""The router: its settings, its parts and its life."""

from __future__ import annotations

import itertools
import logging
import signal
import socket
import threading
from dataclasses import dataclass, replace
from typing import Any

import falcon
from llmcore.api import ConfigError
from llmcore.api.balancing import Balancer
from llmcore_server.listening import (
    Access,
    HostNames,
    HttpServer,
    Limits,
    SameOrigin,
    bind,
    build_app,
    detach,
    is_loopback,
    listener_url,
    raise_open_files,
)

from llmcore_route.addresses import Allowed
from llmcore_route.door import RouterDoor
from llmcore_route.health import Health
from llmcore_route.nodes import Nodes
from llmcore_route.prompts import NO_BODY, wish_of
from llmcore_route.relay import Relays
from llmcore_route.routes import refuse_unknown, routes
from llmcore_route.upstream import Call, request_headers

logger = logging.getLogger(__name__)

SPARE_CONNECTIONS = 256
"""Connections beside those of requests on their way: idle ones, health checks, nodes that register."""

OTHER_FILES = 1024
"""Open files beside two for each request: other connections, and those that ask nodes for their health."""

MODEL_PATH = "/v1/models/"
"""The name of a model follows this path."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The values of the command's options. Times are in seconds."""

    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = ()
    admin_key: str | None = None
    node_api_key: str | None = None
    route_nodes: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    max_concurrent_requests: int = 1024
    health_interval: float = 5.0
    health_timeout: float = 5.0
    drain_timeout: float = 30.0


class Sink:
    """Sends every path that is not the router's own to a node."""

    def __init__(self, relays: Relays) -> None:
        self._relays = relays

    def __call__(self, req: falcon.Request, resp: falcon.Response, **params: Any) -> None:
        """Falcon's interface of a sink. Raises RequestError where the request cannot be sent."""
        refuse_unknown(req)
        body = req.bounded_stream.read()
        wish = wish_of(body) if body else NO_BODY
        if req.path.startswith(MODEL_PATH):
            wish = replace(wish, model=req.path.removeprefix(MODEL_PATH))
        headers = request_headers(req.headers, req.context.request_id)
        call = Call(req.method, req.env["REQUEST_URI"], headers, body)
        self._relays.start(call, wish, lambda: detach(req.env, resp))


class Router:
    """A router on its listening socket. Raises ConfigError for settings that cannot work."""

    def __init__(self, settings: Settings, balancer: Balancer) -> None:
        if not settings.route_nodes and settings.admin_key is None:
            raise ConfigError(
                "no client may add nodes: give --route_nodes, the hosts that may be nodes, or --admin_key, the key "
                "with which nodes are added"
            )
        allowed = Allowed(settings.route_nodes)
        raise_open_files(2 * settings.max_concurrent_requests + OTHER_FILES)
        self._settings = settings
        self.nodes = Nodes(balancer)
        self._relays = Relays(self.nodes, settings.max_concurrent_requests, settings.node_api_key)
        health = Health(self.nodes, settings.health_interval, settings.health_timeout, settings.node_api_key)
        access = Access(api_keys=settings.api_keys, disable_fastapi_docs=True)
        asked = settings.allowed_hosts or (is_loopback(settings.host) and not settings.api_keys)
        guard = SameOrigin(HostNames(settings.allowed_hosts)) if asked else None
        own = routes(self.nodes, allowed, health, by_address=settings.admin_key is None)
        app = build_app([(route, "route") for route in own], access, guard=guard)
        app.add_sink(Sink(self._relays))
        listener = bind(settings.host, settings.port)
        listener.listen(socket.SOMAXCONN)
        self.url = listener_url(listener)
        self._server = HttpServer(
            app,
            listener,
            connections=settings.max_concurrent_requests + SPARE_CONNECTIONS,
            admit=RouterDoor(app, settings.admin_key, guard).admit,
            encoder=app.encoder,
            limits=Limits(),
        )

    def run(self) -> None:
        """Serve until `stop`, take no more requests, let those that are open end, and end those that do not."""
        self._server.run(draining=self.nodes.close, late=self._relays.end_all)

    def end_all(self) -> None:
        """End the requests that are open."""
        self._relays.end_all()

    def stop(self) -> None:
        """End once open requests are answered, or after `drain_timeout`. From any thread, and from signal handlers."""
        self._server.stop(self._settings.drain_timeout)


def serve(settings: Settings, balancer: Balancer) -> None:
    """Run a router until SIGTERM or SIGINT. A second signal ends the requests that are still open."""
    router = Router(settings, balancer)
    logger.info("routing at %s", router.url)
    asked = itertools.count(1)

    def on_signal(number: int, frame: object) -> None:
        if next(asked) == 1:
            router.stop()
        else:  # on a thread of its own: this one may hold a lock of the requests
            threading.Thread(target=router.end_all, name="second signal", daemon=True).start()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_signal)
    router.run()
