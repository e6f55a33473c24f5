"""`python -m llmcore_server.http.admin.process FD`: the admin listener, apart from workers, engine and supervisor.

None of them ever waits for it: it hears from the supervisor, which does not block on it, and answers from memory. So
it answers while every thread of every worker is busy, and while the engine loads.
"""

from __future__ import annotations

import logging
import socket
import sys
import threading

import zmq

from llmcore_server import child
from llmcore_server.http.admin.board import Board
from llmcore_server.http.admin.routes import admin_app
from llmcore_server.http.streaming import HttpServer
from llmcore_server.messages import AdminLaunch, Alive, Mailbox, Outlet, Probe, ToSupervisor, WorkerReady
from llmcore_server.server_status import Overview
from llmcore_server.settings import Server

logger = logging.getLogger(__name__)

CONNECTIONS = 256
TICK_SECONDS = 0.02
"""How often who waits for a step is looked after; without any, a tenth of that is enough."""


class Hub:
    """The thread that hears the supervisor."""

    def __init__(self, launch: AdminLaunch) -> None:
        self._name = launch.name
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._mailbox: Mailbox[Overview] = Mailbox(self._context, launch.mailbox, Overview)
        self._control = Outlet(self._context, launch.addresses.control)
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
    deaf = threading.Event()
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
        threading.Thread(target=_run_hub, args=(hub, server, deaf), name="hub", daemon=True).start()
        server.run()
    except BaseException as error:  # noqa: BLE001 - whatever it is, the operator gets one line and a log file
        child.report_failure(launch, error)
        return 1
    return 1 if deaf.is_set() else 0


def _run_hub(hub: Hub, server: HttpServer, deaf: threading.Event) -> None:
    """Without it the listener would answer from what was true once: it ends, and the supervisor starts another."""
    try:
        hub.run()
    except BaseException:  # an exit would end this thread without a word
        logger.exception("the hub of the admin listener failed")
        deaf.set()
        server.stop(0.0)


if __name__ == "__main__":
    sys.exit(main())
