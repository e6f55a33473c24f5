"""`python -m llmcore.http.tls FD`: ends TLS in front of the HTTP workers.

Bytes go both ways between a client's connection and one to the workers' Unix socket; nothing is parsed. A process of
its own, because OpenSSL's connections cannot be written from one thread while another reads.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import ssl
import sys

import zmq

from llmcore import child
from llmcore.config.certificate import server_context
from llmcore.http.streaming import raise_open_files
from llmcore.wire import HEARTBEAT_SECONDS, Alive, Outlet, TlsLaunch, ToSupervisor, WorkerReady

CONNECTIONS = 4096
"""Most at once; further ones wait to be accepted."""

HANDSHAKE_SECONDS = 10.0
CHUNK = 1 << 16


class Terminator:
    """Carries connections between the listening socket and the workers'."""

    def __init__(self, workers: str) -> None:
        self._workers = workers
        self._free = asyncio.Semaphore(CONNECTIONS)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, until either side ends it."""
        async with self._free:
            try:
                back_reader, back_writer = await asyncio.open_unix_connection(self._workers)
            except OSError:
                writer.transport.abort()
                return
            ways = [
                asyncio.ensure_future(_carry(reader, back_writer)),
                asyncio.ensure_future(_carry(back_reader, writer)),
            ]
            try:
                # Whoever ends first ends both: TLS has no half-closed connections, and a client that left is to be
                # noticed at once.
                await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for way in ways:
                    way.cancel()
                for end in (writer, back_writer):
                    end.close()
                with contextlib.suppress(OSError, ssl.SSLError, asyncio.TimeoutError):
                    await asyncio.wait_for(writer.wait_closed(), 1.0)


async def _carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError, ssl.SSLError):
        while data := await reader.read(CHUNK):
            writer.write(data)
            await writer.drain()


async def run(launch: TlsLaunch) -> None:
    """Serve until SIGTERM."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    listener = socket.socket(fileno=launch.listen_fd)
    listener.setblocking(False)
    server = await asyncio.start_server(
        Terminator(launch.workers).serve,
        sock=listener,
        ssl=server_context(launch.config.access),
        ssl_handshake_timeout=HANDSHAKE_SECONDS,
        ssl_shutdown_timeout=1.0,
        backlog=2048,
    )
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    outlet = Outlet(context, launch.addresses.control)
    outlet.send(ToSupervisor(launch.name, WorkerReady()))
    while not stop.is_set():
        outlet.send(ToSupervisor(launch.name, Alive()))
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(stop.wait(), HEARTBEAT_SECONDS)
    server.close()
    outlet.close(0.0)
    context.term()


def main() -> int:
    """The process; its exit code."""
    launch = child.begin(TlsLaunch)
    try:
        raise_open_files(2 * CONNECTIONS + 128)
        asyncio.run(run(launch))
    except Exception as error:  # noqa: BLE001 - the supervisor gets one line, the log file the traceback
        child.report_failure(launch, error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
