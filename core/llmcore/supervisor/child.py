"""A child process: started with its launch struct on a descriptor, watched by a pidfd."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence

from llmcore.config import child_environment
from llmcore.wire import Launch, encode


class Child:
    """One running child. `pidfd` becomes readable when it has ended."""

    def __init__(self, module: str, launch: Launch, pass_fds: Sequence[int] = ()) -> None:
        self.name = launch.name
        with tempfile.TemporaryFile() as file:
            file.write(encode(launch))
            file.seek(0)
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", module, str(file.fileno())],
                pass_fds=(file.fileno(), *pass_fds),
                stdin=subprocess.DEVNULL,
                env=child_environment(),
                start_new_session=True,
            )
        self.pidfd = os.pidfd_open(self._process.pid)

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether it runs; reaps it when it has ended."""
        return self._process.poll() is None

    @property
    def ending(self) -> str:
        """How it ended, for people."""
        code = self._process.poll()
        if code is None:
            return "is running"
        if code >= 0:
            return f"ended with exit code {code}"
        hint = " (the kernel does this when memory runs out)" if -code == signal.SIGKILL else ""
        return f"was ended by {signal.Signals(-code).name}{hint}"

    def wait(self, seconds: float) -> bool:
        """Whether it has ended, after waiting up to `seconds`."""
        if self.alive:
            select.select([self.pidfd], [], [], max(0.0, seconds))
        return not self.alive

    def send(self, number: signal.Signals) -> None:
        """Send a signal, if it still runs."""
        if self.alive:
            signal.pidfd_send_signal(self.pidfd, number)

    def kill(self) -> None:
        """End it now and reap it."""
        self.send(signal.SIGKILL)
        self._process.wait()

    def close(self) -> None:
        """Give its descriptor back; it must have ended."""
        os.close(self.pidfd)
