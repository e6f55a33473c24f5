"""Child processes. A child is started with its launch struct on a descriptor, watched by a pidfd, and ended with its
whole process group.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import zmq
from llmcore.config import Config, child_environment

from llmcore_server.child import FROM_OUTSIDE, STACKS
from llmcore_server.messages import LastWords, Launch, Outlet, encode_launch
from llmcore_server.supervisor.rundir import CONTROL, RunDirectory
from llmcore_server.supervisor.watchdog import Clock

STACKS_SECONDS = 3.0
"""The most time that a hung process has to write its stacks before it is killed."""

_MOST_WORDS = 1 << 17


class Child:
    """One running child. `pidfd` becomes readable when it has ended. The processes that it started end with it.

    `outlet` leads to its mailbox.
    """

    def __init__(
        self,
        module: str,
        launch: Launch,
        pass_fds: Sequence[int] = (),
        *,
        outlet: Outlet | None = None,
        thread_caches: bool = True,
    ) -> None:
        self.name = launch.name
        self._outlet = outlet
        self._killed = False
        # In memory: a full disk must not keep a server from replacing what died.
        self._papers = os.memfd_create(launch.name)
        try:
            papers = encode_launch(launch)
            self._words_at = os.write(self._papers, papers)
            if self._words_at < len(papers):  # it is a file, if one in memory: RLIMIT_FSIZE counts
                raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))
            with _blocked():
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-m", module, str(self._papers)],
                    pass_fds=(self._papers, *pass_fds),
                    stdin=subprocess.DEVNULL,
                    env=child_environment(thread_caches=thread_caches),
                    start_new_session=True,
                )
            try:
                self.pidfd = os.pidfd_open(self._process.pid)
            except OSError:  # no descriptor is left, so it could not be watched
                self._process.kill()
                self._process.wait()
                raise
        except OSError:
            os.close(self._papers)
            raise

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """True while it runs. When it has ended, this ends the rest of its group and reaps it."""
        if self._process.returncode is not None:
            return False
        if os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            return True
        self._end_group()
        self._process.wait()
        return False

    @property
    def stopped(self) -> bool:
        """True while a signal has it stopped."""
        if self._process.returncode is not None:
            return False
        return os.waitid(os.P_PIDFD, self.pidfd, os.WSTOPPED | os.WNOHANG | os.WNOWAIT) is not None

    @property
    def last_words(self) -> LastWords | None:
        """The words that it left before it ended, or while it ends."""
        data = os.pread(self._papers, _MOST_WORDS, self._words_at)
        try:
            return msgspec.msgpack.decode(data, type=LastWords) if data else None
        except msgspec.DecodeError:  # it is about to say more
            return None

    @property
    def spoke(self) -> int:
        """The time at which it left its last words, in nanoseconds; 0 if it left none."""
        return os.fstat(self._papers).st_mtime_ns if self.last_words is not None else 0

    @property
    def ending(self) -> str:
        """The way it ended, for people."""
        if self.alive:
            return "is running"
        code = self._process.returncode
        if code >= 0:
            return f"ended with exit code {code}"
        hint = " (the kernel does this when memory runs out)" if -code == signal.SIGKILL and not self._killed else ""
        return f"was ended by {signal.Signals(-code).name}{hint}"

    @property
    def killed(self) -> bool:
        """True if a signal has ended it, so another one may serve."""
        return not self.alive and self._process.returncode < 0

    @property
    def failed(self) -> bool:
        """True if it has ended and was not asked to, or has said why it will."""
        return self.last_words is not None or not (self.alive or self._process.returncode == 0)

    def wait(self, seconds: float) -> bool:
        """Wait up to `seconds` for its end. Returns True if it has ended."""
        if self.alive:
            select.select([self.pidfd], [], [], max(0.0, seconds))
        return not self.alive

    def send(self, number: signal.Signals) -> None:
        """Send a signal, if it still runs."""
        if self.alive:
            signal.pidfd_send_signal(self.pidfd, number)

    def kill(self) -> None:
        """End it and its group now, and reap it."""
        if self.alive:
            self._killed = True
            self._end_group()
            self._process.wait()

    def kill_with_stacks(self) -> None:
        """Let a process that hangs write the stacks of its threads to its log file, and end it.

        The signal is for its main thread: one that was stopped would else go on with its work, such as accepting
        connections, while another thread writes.
        """
        if self.alive:
            self._killed = True
            ctypes.CDLL(None).tgkill(self.pid, self.pid, STACKS)
        self.send(signal.SIGCONT)
        self.wait(STACKS_SECONDS)
        self.kill()

    def tell(self, message: object) -> None:
        """Send it a message. A child that does not read its mailbox misses it."""
        if self._outlet is not None:
            self._outlet.send(message)

    def close(self) -> None:
        """Give its descriptors back; it must have ended."""
        if self._outlet is not None:
            self._outlet.close(0.0)
        os.close(self.pidfd)
        os.close(self._papers)

    def _end_group(self) -> None:
        # It is not reaped yet, so its number still belongs to it.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)


@contextlib.contextmanager
def _blocked() -> Iterator[None]:
    """Inside, a process begins with FROM_OUTSIDE blocked, so that they cannot end it before it ignores them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, FROM_OUTSIDE)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class Spawner:
    """Starts the children of one server, which all report to its mailbox `control`.

    `clock` measures the supervisor's patience with them.
    """

    def __init__(self, config: Config, directory: RunDirectory, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self.config = config
        self.directory = directory
        self.control = directory.address(CONTROL)
        self.clock = Clock()
        self._context = context

    def spawn(
        self,
        module: str,
        kind: type[Launch],
        name: str,
        fds: Sequence[int] = (),
        *,
        mailbox: str = "",
        unread: int = 10_000,
        thread_caches: bool = True,
        **more: Any,
    ) -> Child:
        """Start `module` with a launch of this kind, whose further fields are in `more`. Raises OSError.

        `mailbox`: its endpoint. `unread`: the most messages that may lie unread there; later ones are lost.
        """
        launch = kind(
            name=name,
            parent=os.getpid(),
            log=str(self.directory.log(name)),
            control=self.control,
            mailbox=mailbox,
            **{"config": self.config, **more},
        )
        outlet = Outlet(self._context, mailbox, most=unread) if mailbox else None
        try:
            return Child(module, launch, fds, outlet=outlet, thread_caches=thread_caches)
        except OSError:
            if outlet is not None:
                outlet.close(0.0)
            raise
