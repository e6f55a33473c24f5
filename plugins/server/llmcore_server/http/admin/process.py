"""`python -m llmcore_server.http.admin.process FD`: the admin listener, in a process of its own.

It hears from the supervisor, which does not block on it, and answers from memory in well under a millisecond. No
other process ever waits for it. So it answers while every thread of every worker is busy, and while the engine loads.
"""

from __future__ import annotations

import logging
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.resources import files
from typing import Any

import falcon
import msgspec
import orjson
import zmq
from llmcore.api.errors import RequestError
from llmcore.config import Config

from llmcore_server import child
from llmcore_server.http import streaming
from llmcore_server.http.access import admin_guard
from llmcore_server.http.admin.board import WINDOW, Board
from llmcore_server.http.app import App, build_app
from llmcore_server.http.deadlines import number
from llmcore_server.http.errors import no_route
from llmcore_server.http.front import Route
from llmcore_server.http.streaming import HttpServer
from llmcore_server.messages import NO_PAGE, AdminLaunch, Alive, Mailbox, Outlet, Probe, ToSupervisor, WorkerReady
from llmcore_server.server_status import Overview, server_info
from llmcore_server.settings import Access, Server

OPEN_PATHS = frozenset({"/", "/live", "/ready", "/dashboard"})
"""Paths that need no key. Programs that restart servers have none, and the page itself holds no figures."""

PAGE_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'"
"""Content-Security-Policy of the dashboard: it loads nothing, and talks to this listener only."""


class Answer:
    """A resource that answers with (status, content type, body)."""

    def __init__(self, make: Callable[[], tuple[int, str, bytes]], summary: str) -> None:
        self._make = make
        self.__doc__ = summary

    def on_get(self, req: falcon.Request, resp: falcon.Response) -> None:
        """See the class."""
        status, resp.content_type, resp.data = self._make()
        resp.status = falcon.code_to_http_status(status)
        resp.set_header("Cache-Control", "no-store")


class Ready:
    """200 while requests can be served and a step has finished lately, else 503 and why."""

    def __init__(self, board: Board) -> None:
        self._board = board

    def on_get(self, req: falcon.Request, resp: falcon.Response) -> None:
        """An engine that has long been idle does a step first."""
        verdict = self._board.verdict()
        resp.set_header("Cache-Control", "no-store")
        if verdict.idle:
            self._board.await_step(streaming.detach(req.env, resp))
            return
        resp.status = falcon.code_to_http_status(verdict.status)
        resp.content_type, resp.data = "application/json", verdict.body


class Figures:
    """The last minutes, for the dashboard; `?since=` (a sample's time) leaves out what the client has."""

    def __init__(self, board: Board) -> None:
        self._board = board

    def on_get(self, req: falcon.Request, resp: falcon.Response) -> None:
        """Samples, and what is true now."""
        since = number(req.get_param("since") or "0")
        if since is None:
            raise RequestError("since: give the time of a sample, a number", param="since")
        overview, verdict = self._board.overview, self._board.verdict()
        now: dict[str, Any] = {
            "ready": verdict.ready or verdict.idle,
            "reason": "" if verdict.idle else verdict.reason,
        }
        if overview is not None:
            now |= {
                "started": overview.server.started,
                "uptime_seconds": overview.server.uptime,
                "kv_total": overview.load.kv_total,
                "ended": overview.ended,
                "counts": overview.counts,
                "processes": overview.server.processes,
                "load": overview.load.figures(),
                "engines": [
                    {"name": one.name, "serves": one.serves, "load": one.load.figures()} for one in overview.engines
                ],
            }
        samples = [] if verdict.reason and overview is None else self._board.history.since(since)
        resp.content_type = "application/json"
        resp.set_header("Cache-Control", "no-store")
        resp.data = msgspec.json.encode({"window_seconds": WINDOW, "now": now, "samples": samples})


class Dashboard:
    """The live page: one file that loads nothing else."""

    def __init__(self) -> None:
        self._html = files("llmcore_server.http.admin").joinpath("dashboard.html").read_bytes()

    def on_get(self, req: falcon.Request, resp: falcon.Response) -> None:
        """The page."""
        resp.content_type, resp.data = "text/html; charset=utf-8", self._html
        resp.set_header("Content-Security-Policy", PAGE_POLICY + "; frame-ancestors 'none'")
        resp.set_header("Cache-Control", "no-cache")


class Home:
    """The way to the dashboard."""

    def on_get(self, req: falcon.Request, resp: falcon.Response) -> None:
        """302."""
        resp.status = falcon.HTTP_302
        resp.set_header("Location", "/dashboard")


def routes(config: Config, board: Board) -> Iterator[Route]:
    """Every route there is."""

    def live() -> tuple[int, str, bytes]:
        ok = not board.silent
        body = {"status": "ok"} if ok else {"status": "error", "reason": "the supervisor does not answer"}
        return (200 if ok else 503), "application/json", orjson.dumps(body)

    def metrics() -> tuple[int, str, bytes]:
        return 200, *(NO_PAGE if board.overview is None else board.overview.page)

    def grafana() -> tuple[int, str, bytes]:
        return 200, "application/json", files("llmcore_server.prometheus").joinpath("grafana.json").read_bytes()

    def info() -> tuple[int, str, bytes]:
        verdict = board.verdict()
        reason = "" if verdict.ready or verdict.idle else verdict.reason
        seen = board.overview
        if seen is None:
            return 200, "application/json", server_info(config, None, None, (), reason)
        return 200, "application/json", server_info(config, seen.server, seen.facts, seen.engines, reason)

    yield Route("/", Home())
    yield Route("/live", Answer(live, "200 while the server's supervisor lives."))
    yield Route("/ready", Ready(board))
    yield Route("/metrics", Answer(metrics, "Prometheus."))
    yield Route("/server_info", Answer(info, "What runs here."))
    yield Route("/figures", Figures(board))
    yield Route("/grafana.json", Answer(grafana, "A Grafana dashboard of the metrics."))
    yield Route("/dashboard", Dashboard())


def admin_app(config: Config, board: Board) -> App:
    """The application. With keys every path but OPEN_PATHS wants one, as on the server itself."""
    access = replace(config.section(Access), allow_origins=(), disable_fastapi_docs=True)
    table = [(route, "core") for route in routes(config, board)]
    app = build_app(table, access, open_paths=OPEN_PATHS, guard=admin_guard(config))
    known = ", ".join(route.path for route, _ in table)

    def nowhere(req: falcon.Request, resp: falcon.Response, **kwargs: Any) -> None:
        raise no_route(req.method, req.path, known)

    app.add_sink(nowhere)
    return app


CONNECTIONS = 256
TICK_SECONDS = 0.02
"""Seconds between two checks for requests that wait for a step; ten times as long while there are none."""


class Hub:
    """The thread that hears the supervisor."""

    def __init__(self, launch: AdminLaunch) -> None:
        self._name = launch.name
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._mailbox: Mailbox[Overview] = Mailbox(self._context, launch.mailbox, Overview)
        self._control = Outlet(self._context, launch.control)
        self._sending = threading.Lock()
        self.board = Board(launch.config.section(Server).ready_timeout, self._probe)

    def run(self) -> None:
        """Until the process ends."""
        self._tell(WorkerReady())
        while True:
            self._mailbox.wait(TICK_SECONDS if self.board.awaited else 10 * TICK_SECONDS)
            for overview in self._mailbox.drain():
                self.board.heard(overview)
                self._tell(Alive())
            self.board.tick()

    def _probe(self) -> None:
        self._tell(Probe())

    def _tell(self, body: WorkerReady | Alive | Probe) -> None:
        with self._sending:
            self._control.send(ToSupervisor(self._name, body))


def main() -> int:
    """Run until killed: there is nothing to finish."""
    launch = child.begin(AdminLaunch)
    logging.getLogger("waitress").setLevel(logging.ERROR)
    try:
        hub = Hub(launch)
        app = admin_app(launch.config, hub.board)
        server = HttpServer(
            app,
            socket.socket(fileno=launch.listen_fd),
            connections=CONNECTIONS,
            admit=app.admit,
            encoder=app.encoder,
        )
        threading.Thread(target=server.run_hub, args=(hub.run, "the admin listener"), name="hub", daemon=True).start()
        server.run()
    except BaseException as error:  # noqa: BLE001 - for any error the operator gets one line and a log file
        child.report_failure(launch, error)
        return 1
    return int(server.deaf)


if __name__ == "__main__":
    sys.exit(main())
