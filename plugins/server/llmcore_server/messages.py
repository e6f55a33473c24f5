"""The messages between the processes of one server: msgpack structs over ZMQ PUSH and PULL, and nothing else.

The mailboxes, each a PULL socket that its owner binds:

- each engine's: `ToEngine` from every worker and from the supervisor,
- each worker's: `ToWorker` from the supervisor, and one more for each engine: `EngineToWorker`, with one `StepEvents`
  per step,
- the supervisor's (`control`): `ToSupervisor` from every child.

A child is started with the number of an inherited descriptor as its only argument and reads its launch struct from
there (`llmcore_server.child`). A message that is not a valid struct is dropped and counted; none is ever executed.
"""

from __future__ import annotations

import logging
import os
import time
from typing import Any, Generic, TypeVar

import msgspec
import zmq
from llmcore import __version__
from llmcore.api.bridge import Abort, FinishChoice, Load, ModelFacts, StepEvents, Submit
from llmcore.api.counters import TALLIES, Counted, ServerFigures
from llmcore.api.errors import ConfigError
from llmcore.api.protocols import RequestRecord
from llmcore.config import Config

logger = logging.getLogger(__name__)

HEARTBEAT_SECONDS = 0.25
"""Seconds between a worker's `Heartbeat`s to the engine and `Alive`s to the supervisor."""

MAX_MESSAGE_BYTES = 64 << 20
"""A larger message closes its connection."""

SUPERVISOR = -1
"""`ToEngine.sender` of the supervisor; workers have numbers from 0, never used twice."""


# --- launch structs: what a child reads from its descriptor ----------------------------------------------------------


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    """The fields that every child needs. Endpoints are ZMQ's."""

    name: str
    parent: int
    """The supervisor's process id."""
    log: str
    """The file for tracebacks and stacks."""
    control: str
    """The endpoint of the supervisor's mailbox."""
    config: Config
    mailbox: str = ""
    """The endpoint that the child binds; "" for a child without a mailbox."""


class EngineLaunch(Launch, frozen=True, kw_only=True):
    """The launch of `python -m llmcore_server.engine.process FD`."""

    report_seconds: float
    """Seconds between two `Snapshot`s."""
    device: int = 0
    """The number of its device."""
    store: str = ""
    """The file through which its ranks meet; this and the fields below matter where `--tp` asks for several."""
    mailboxes: tuple[str, ...] = ()
    """The endpoints that the other ranks bind, in order of rank."""
    answers: str = ""
    """The endpoint that it binds for their answers."""
    beat_seconds: float = HEARTBEAT_SECONDS
    """Seconds between two `Beat`s."""


class RankLaunch(Launch, frozen=True, kw_only=True):
    """The launch of `python -m llmcore_server.engine.rank FD`."""

    rank: int
    """Its number, from 1."""
    device: int
    """The number of its device."""
    store: str
    """The file through which the ranks meet."""
    link: str
    """The endpoint that it binds for the messages of rank 0."""
    answers: str
    """The endpoint of rank 0's mailbox for answers."""
    beat_seconds: float
    """Seconds between two `Beat`s."""


class WorkerLaunch(Launch, frozen=True, kw_only=True):
    """The launch of `python -m llmcore_server.http.worker FD`."""

    worker: int
    """Its number."""
    engines: tuple[str, ...]
    """The endpoints of the engines' mailboxes."""
    listen_fd: int
    """The listening socket, which all workers inherit."""
    tokenizer_dir: str
    """The directory of the tokenizer: model_dir, or that of its conversion."""
    facts_fd: int
    """A pipe for the model's facts (`read_facts`), which come when the engines have loaded it."""


class TlsLaunch(Launch, frozen=True, kw_only=True):
    """The launch of `python -m llmcore_server.http.tls FD`."""

    listen_fd: int
    """The listening socket, inherited."""
    workers: str
    """The path of the Unix socket that the workers listen on."""


class AdminLaunch(Launch, frozen=True, kw_only=True):
    """The launch of `python -m llmcore_server.http.admin.process FD`. Its mailbox takes `server_status.Overview`."""

    listen_fd: int
    """Its listening socket, inherited."""


# --- to the engine ---------------------------------------------------------------------------------------------------


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """A worker's first message: send its events to `mailbox`."""

    mailbox: str


class Heartbeat(msgspec.Struct, frozen=True, tag="heartbeat"):
    """A worker lives. `seen`: `StepEvents.stamp` of the newest step it has handled (0.0: none yet).

    The engine ends the requests of a worker whose heartbeat is late by a second, or for which more than 64 MB or
    1 s of steps lie unseen.
    """

    seen: float


class WorkerGone(msgspec.Struct, frozen=True, tag="gone"):
    """From the supervisor: worker `worker` has died; abort what it owned and forget its mailbox."""

    worker: int


class Shutdown(msgspec.Struct, frozen=True, tag="shutdown"):
    """From the supervisor: end now, exit code 0. A worker first lets its streams finish, up to `grace` seconds."""

    grace: float = 0.0


class Probe(msgspec.Struct, frozen=True, tag="probe"):
    """From the admin listener to the supervisor, and on to the engine: do a step, if there is nothing else to do."""


class ToEngine(msgspec.Struct, frozen=True, array_like=True):
    """A message in the engine's mailbox; `sender` is a worker's number, the owner of its requests, or SUPERVISOR."""

    sender: int
    body: Submit | Abort | FinishChoice | Hello | Heartbeat | WorkerGone | Shutdown | Probe


# --- to a worker -----------------------------------------------------------------------------------------------------


class Process(msgspec.Struct, frozen=True):
    """One child of the supervisor."""

    name: str
    pid: int
    alive: bool


class ServerFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The facts of a whole server beside its load. `started`: when it was started, as time.time(), and `began` the
    same as time.monotonic()."""

    url: str
    started: float
    began: float
    processes: tuple[Process, ...] = ()

    @property
    def uptime(self) -> float:
        """Seconds since the server was started, whatever the wall clock did meanwhile; in processes of its machine."""
        return round(time.monotonic() - self.began, 1)


class EngineStatus(msgspec.Struct, frozen=True):
    """One engine of the server. `stepped`: time.monotonic() when its newest finished step was heard of, 0.0 before the
    first."""

    name: str
    serves: bool
    stepped: float
    load: Load


NO_PAGE = ("text/plain; charset=utf-8", b"")
"""`State.page` where no metric sink has a page."""


class State(msgspec.Struct, frozen=True, kw_only=True, tag="state"):
    """From the supervisor, about once a second and at every change: what health and metrics routes answer.

    `reason`: why the server is not ready. `load`: of all engines together. `page`: (content type, body) of `/metrics`.
    `server`: None before the supervisor's first word.
    """

    ready: bool
    reason: str = ""
    load: Load = Load()
    engines: tuple[EngineStatus, ...] = ()
    page: tuple[str, bytes] = NO_PAGE
    server: ServerFacts | None = None


class EngineGone(msgspec.Struct, frozen=True, tag="engine_gone"):
    """From the supervisor: this engine has died. `message`: the reason why the server is not ready if no other one is
    there."""

    engine: int
    message: str


class EngineBack(msgspec.Struct, frozen=True, tag="engine_back"):
    """From the supervisor: another engine has taken the place of the one with this number, which had died."""

    engine: int


class EngineLoad(msgspec.Struct, frozen=True, tag="engine_load"):
    """From the supervisor of several engines, after each report of one of them: its figures."""

    engine: int
    load: Load


class Routed(msgspec.Struct, frozen=True, tag="routed"):
    """A worker has sent a request to one of several engines. The supervisor passes it on to the other workers, so that
    they choose as if they had sent it."""

    engine: int
    tokens: int
    """Those that the engine has to compute before the first token."""
    chunks: list[int]
    """The chunks of its prompt, as `llmcore.fleet.hits` numbers them; none if the prompt does not stay cached."""


class Intake(msgspec.Struct, frozen=True, tag="intake"):
    """From the engine, at every change: `full` if it has no room for another request, and the seconds after which one
    is worth another try."""

    full: bool
    retry_after: int


ToWorker = State | EngineGone | EngineBack | EngineLoad | Routed | Shutdown
"""From the supervisor."""

EngineToWorker = StepEvents | Intake
"""From an engine. A worker has a mailbox for each of them."""


# --- to the supervisor -----------------------------------------------------------------------------------------------


class EngineReady(msgspec.Struct, frozen=True, tag="engine_ready"):
    """The model is built and the engine's mailbox is bound."""

    facts: ModelFacts


class WorkerReady(msgspec.Struct, frozen=True, tag="worker_ready"):
    """The worker accepts connections."""


class Alive(msgspec.Struct, frozen=True, tag="alive"):
    """The threads of a worker, or of the end of TLS, make progress; every HEARTBEAT_SECONDS once it is ready.

    One that is silent for `--watchdog_timeout` is killed and replaced.
    """


class LastWords(msgspec.Struct, frozen=True):
    """Why a child cannot start or go on: the one line that people read. Its traceback is in its log file.

    They are not a message. They stand behind the launch struct, on its descriptor, so they are there after the child's
    end.

    `usage`: the text is an LlmcoreError's and names the fix; the operator's settings are at fault.
    """

    message: str
    usage: bool = False


class Progress(msgspec.Struct, frozen=True, tag="progress"):
    """The progress of a start-up: `done` of `total` units of `stage` (bytes of "weights", say)."""

    stage: str
    done: int
    total: int


class Snapshot(msgspec.Struct, frozen=True, tag="snapshot"):
    """The engine's figures, every `EngineLaunch.report_seconds` from its step loop, idle or not.

    `paused`: what follows may take long (compilation, capture), so the watchdog waits until the next Snapshot that
    is not paused.
    """

    load: Load
    paused: bool = False


class Beat(msgspec.Struct, frozen=True, tag="beat"):
    """A rank of a group of several lives, and does `doing` in step `number` (0: before the first).

    `pid`: its process id. `device`: its device, for people.
    """

    pid: int
    number: int
    doing: str
    device: str


class Finished(msgspec.Struct, frozen=True, tag="finished"):
    """A worker's request ended."""

    record: RequestRecord


class Tallied(msgspec.Struct, frozen=True, tag="tallied"):
    """A child's `counters.ServerFigures`: totals since it started, about once a second while they change."""

    counts: tuple[tuple[str, tuple[str, ...], int], ...]
    gaps: tuple[int, ...]
    gap_seconds: float


class ToSupervisor(msgspec.Struct, frozen=True, array_like=True):
    """A message in the supervisor's mailbox; `sender` is the child's name ("engine-0", "worker-3")."""

    sender: str
    body: EngineReady | WorkerReady | Alive | Progress | Snapshot | Beat | Finished | Tallied | Routed | Probe


class Tally:
    """The totals of process `name` for the supervisor, which hears of them when they have changed."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._told = ServerFigures()

    def news(self, mailbox: Mailbox[Any] | None = None) -> Tallied | None:
        """The totals, with what `mailbox` dropped, or None if they are those of the last call."""
        if mailbox is not None:
            TALLIES.set("dropped_messages", self._name, total=mailbox.dropped)
        figures = TALLIES.figures()
        if figures == self._told:
            return None
        self._told = figures
        return Tallied(rows(figures), figures.gaps, figures.gap_seconds)


def rows(figures: ServerFigures) -> tuple[tuple[str, tuple[str, ...], int], ...]:
    """The counts of `figures` as they travel."""
    return tuple((name, labels, total) for (name, labels), total in figures.counts.items())


def counts(rows: tuple[tuple[str, tuple[str, ...], int], ...]) -> dict[Counted, int]:
    """The counts that `rows` has made."""
    return {(name, labels): total for name, labels, total in rows}


# --- mailboxes -------------------------------------------------------------------------------------------------------

_ENCODER = msgspec.msgpack.Encoder()

_IPC = "ipc://"

M = TypeVar("M")
L = TypeVar("L", bound=Launch)


def encode(message: object) -> bytes:
    """A struct (or the frozen dataclasses inside it) as msgpack."""
    return _ENCODER.encode(message)


def encode_launch(launch: Launch) -> bytes:
    """A launch struct as its child reads it, after a line with this version of llmcore."""
    return __version__.encode() + b"\n" + encode(launch)


def decode_launch(data: bytes, kind: type[L]) -> L:
    """A launch struct from its bytes. Raises ConfigError where another version of llmcore wrote them."""
    version, _, body = data.partition(b"\n")
    if version != __version__.encode():
        raise ConfigError(
            f"the server runs llmcore {version.decode(errors='replace')[:40]} and {__version__} is installed now; "
            "restart the server"
        )
    return msgspec.msgpack.decode(body, type=kind)


def read_facts(launch: WorkerLaunch) -> ModelFacts:
    """The facts that the supervisor writes into a worker's pipe, once they are there."""
    with open(launch.facts_fd, "rb") as file:
        return msgspec.msgpack.decode(file.read(), type=ModelFacts)


class Mailbox(Generic[M]):
    """A PULL socket, bound to `endpoint`, and the one type it accepts. For one thread.

    `dropped` counts what was not of that type; the first is logged. A socket in the file system takes connections of
    this user's processes only.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str, kind: Any) -> None:
        self.dropped = 0
        self._decoder: msgspec.msgpack.Decoder[M] = msgspec.msgpack.Decoder(kind)
        self._socket = context.socket(zmq.PULL)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.LINGER, 0)
        if endpoint.startswith(_IPC):
            self._socket.setsockopt(zmq.IPC_FILTER_UID, os.getuid())
        self._socket.bind(endpoint)
        self.endpoint = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        if endpoint.startswith(_IPC):
            os.chmod(endpoint.removeprefix(_IPC), 0o600)

    @property
    def socket(self) -> zmq.Socket[bytes]:
        """For a poller."""
        return self._socket

    def wait(self, seconds: float) -> bool:
        """Wait up to `seconds` for a message. Returns True if there is one."""
        return bool(self._socket.poll(int(seconds * 1000)))

    def drain(self, most: int = 1000) -> list[M]:
        """The messages that have arrived, in order, at most `most`. It never waits."""
        messages: list[M] = []
        while len(messages) < most:
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            try:
                if len(frames) > 1:
                    raise ValueError(f"it has {len(frames)} parts")
                messages.append(self._decoder.decode(frames[0]))
            except (ValueError, RecursionError) as error:  # msgspec.DecodeError is a ValueError
                if not self.dropped:
                    logger.warning("a message to %s is not one of ours and is dropped: %s", self.endpoint, error)
                self.dropped += 1
        return messages

    def close(self) -> None:
        """Unbind; what was not read is lost."""
        self._socket.close()


class Outlet:
    """A connected PUSH socket that never blocks. For one thread."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str, *, most: int = 10_000) -> None:
        self._socket = context.socket(zmq.PUSH)
        self._socket.setsockopt(zmq.SNDHWM, most)
        self._socket.setsockopt(zmq.LINGER, 500)
        self._socket.connect(endpoint)

    def send(self, message: object) -> int:
        """Queue a struct; returns its size in bytes, or 0 if `most` messages already lie unread (it is lost)."""
        data = _ENCODER.encode(message)
        try:
            self._socket.send(data, zmq.NOBLOCK)
        except zmq.Again:
            return 0
        return len(data)

    def close(self, linger_seconds: float = 0.5) -> None:
        """Disconnect; what is queued still has `linger_seconds` to leave."""
        self._socket.close(linger=int(linger_seconds * 1000))
