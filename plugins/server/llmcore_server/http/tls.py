"""`python -m llmcore_server.http.tls FD`: ends TLS in front of the HTTP workers.

Bytes go both ways between a client's connection and one to the workers' Unix socket; nothing is parsed. A process of
its own, because OpenSSL's connections cannot be written from one thread while another reads.
"""

from __future__ import annotations

import asyncio
import contextlib
import select
import socket
import ssl
import sys
from collections import Counter

import zmq
from llmcore.api.errors import RequestError
from llmcore.config import Config

from llmcore_server import child
from llmcore_server.http.access import announcement
from llmcore_server.http.certificate import server_context
from llmcore_server.http.streaming.limits import (
    REFUSALS,
    SPARE_FILES,
    Limits,
    connections,
    raise_open_files,
    too_many,
    too_many_of_address,
)
from llmcore_server.http.streaming.tasks import Unread, refusal
from llmcore_server.messages import HEARTBEAT_SECONDS, Alive, Outlet, Tally, TlsLaunch, ToSupervisor, WorkerReady
from llmcore_server.settings import Access, Server

HANDSHAKE_SECONDS = 10.0
CHUNK = 1 << 16


class Terminator:
    """Carries connections between the listening socket and the workers'.

    `most`: the limit at a time; it is the number that the workers answer, if only by a 503. `per_address`: the limit
    per address, which the workers cannot see; 0 for any number. Connections beyond a limit are refused here.
    """

    def __init__(self, workers: str, *, most: int, per_address: int) -> None:
        self._workers = workers
        self._most = most
        self._per_address = per_address
        self._open = 0
        self._refused = 0
        self._by_address: Counter[str] = Counter()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, until either side ends it."""
        name = writer.get_extra_info("peername")
        address = str(name[0]) if name else ""
        if self._open >= self._most:
            await self._refuse(reader, writer, too_many())
        elif 0 < self._per_address <= self._by_address[address]:
            await self._refuse(reader, writer, too_many_of_address(self._per_address))
        else:
            self._open += 1
            self._by_address[address] += 1
            try:
                await self._join(reader, writer)
            finally:
                self._open -= 1
                self._by_address[address] -= 1
                if not self._by_address[address]:
                    del self._by_address[address]

    async def _join(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            back_reader, back_writer = await asyncio.open_unix_connection(sock=await self._reach(writer))
        except OSError:
            writer.transport.abort()
            return
        ways = [
            asyncio.ensure_future(_carry(reader, back_writer)),
            asyncio.ensure_future(_carry(back_reader, writer)),
        ]
        try:
            # The first end ends both: TLS has no half-closed connections, and a client disconnect is to be noticed at
            # once. But a worker that refuses a request still takes the client's bytes, so that the client can read
            # why.
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            if not ways[0].done() and _still_reads(back_writer):
                await asyncio.wait(ways[:1], timeout=Limits.longest_linger_seconds)
        finally:
            for way in ways:
                way.cancel()
            for end in (writer, back_writer):
                end.close()
            with contextlib.suppress(OSError, ssl.SSLError, asyncio.TimeoutError):
                await asyncio.wait_for(writer.wait_closed(), 1.0)

    async def _reach(self, writer: asyncio.StreamWriter) -> socket.socket:
        """A connection to the workers that names the client. Raises OSError if the workers take none."""
        inner = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            inner.setblocking(False)
            name = writer.get_extra_info("peername")
            if name:
                inner.bind(announcement(str(name[0]), int(name[1])))
            await asyncio.get_running_loop().sock_connect(inner, self._workers)
        except BaseException:
            inner.close()
            raise
        return inner

    async def _refuse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, error: RequestError) -> None:
        """Answer with `error`, and throw away what comes meanwhile, so that the answer is not lost to a reset."""
        if self._refused >= REFUSALS:
            writer.transport.abort()
            return
        self._refused += 1
        try:
            writer.write(refusal(Unread(error), close=True)[0])
            with contextlib.suppress(OSError, ssl.SSLError, asyncio.TimeoutError):
                await asyncio.wait_for(_drop(reader), Limits.linger_seconds)
        finally:
            self._refused -= 1
            writer.close()


def _still_reads(writer: asyncio.StreamWriter) -> bool:
    """True if the other end of a connection has only stopped sending."""
    poll = select.poll()
    poll.register(writer.get_extra_info("socket").fileno(), 0)
    return not poll.poll(0)


async def _drop(reader: asyncio.StreamReader) -> None:
    while await reader.read(CHUNK):
        pass


async def _carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError, ssl.SSLError):
        while data := await reader.read(CHUNK):
            writer.write(data)
            await writer.drain()


def most_connections(config: Config) -> int:
    """The number that all workers answer, or that this process has files for, two each. Raises ConfigError if that is
    less than one worker answers."""
    answered = connections(config) + REFUSALS
    spare = REFUSALS + SPARE_FILES
    files = raise_open_files(2 * answered + spare, 2 * answered * config.section(Server).httpserver_workers + spare)
    return (files - spare) // 2


async def run(launch: TlsLaunch, most: int) -> None:
    """Serve until the supervisor says STOP."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(child.STOP, stop.set)
    listener = socket.socket(fileno=launch.listen_fd)
    listener.setblocking(False)
    server = await asyncio.start_server(
        Terminator(
            launch.workers, most=most, per_address=launch.config.section(Server).max_connections_per_address
        ).serve,
        sock=listener,
        ssl=server_context(launch.config.section(Access)),
        ssl_handshake_timeout=HANDSHAKE_SECONDS,
        ssl_shutdown_timeout=1.0,
        backlog=2048,
    )
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    outlet = Outlet(context, launch.control)
    outlet.send(ToSupervisor(launch.name, WorkerReady()))
    tally = Tally(launch.name)
    while not stop.is_set():
        outlet.send(ToSupervisor(launch.name, Alive()))
        if news := tally.news():  # the connections that were refused here
            outlet.send(ToSupervisor(launch.name, news))
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(stop.wait(), HEARTBEAT_SECONDS)
    server.close()
    outlet.close(0.0)
    context.term()


def main() -> int:
    """The process; its exit code."""
    launch = child.begin(TlsLaunch)
    try:
        asyncio.run(run(launch, most_connections(launch.config)))
    except Exception as error:  # noqa: BLE001 - the supervisor gets one line, the log file the traceback
        child.report_failure(launch, error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
