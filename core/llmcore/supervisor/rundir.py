"""The private directory of one running server: sockets, log files of its children, a converted tokenizer."""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
import tempfile
import time
from pathlib import Path

IPC_ROOT = Path("/tmp")
"""As `--zmq_mode ipc:///tmp/` says, whatever TMPDIR is: the path of a socket has room for 107 bytes."""

_PREFIX = "llmcore-"
_LOCK = "lock"
_YOUNG_SECONDS = 60.0


class RunDirectory:
    """A directory with mode 0700 and a name nobody can guess, under /tmp or, where it holds no sockets, the system's
    temporary one; gone after `remove`.

    What a killed server left behind is removed when the next one starts: its lock is free then, whatever process
    namespace it lived in.
    """

    def __init__(self, zmq_mode: str) -> None:
        self._tcp = zmq_mode.startswith("tcp")
        root = Path(tempfile.gettempdir()) if self._tcp else IPC_ROOT
        remove_stale(root)
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=root))
        self._lock = os.open(self.path / _LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)

    def address(self, name: str) -> str:
        """A ZMQ endpoint for the mailbox called `name`: a socket in this directory, or a free port of loopback."""
        if not self._tcp:
            return f"ipc://{self.path / name}"
        with socket.create_server(("127.0.0.1", 0)) as probe:
            return f"tcp://127.0.0.1:{probe.getsockname()[1]}"

    def log(self, child: str) -> Path:
        """Where a child writes its tracebacks and stacks."""
        return self.path / f"{child}.log"

    def keep_log(self, child: str) -> Path | None:
        """Copy a child's log file out of the directory, for people to read; None if it is empty."""
        log = self.log(child)
        if not log.exists() or not log.stat().st_size:
            return None
        descriptor, kept = tempfile.mkstemp(prefix=f"{_PREFIX}{child}-", suffix=".log")
        with os.fdopen(descriptor, "wb") as file:
            file.write(log.read_bytes())
        return Path(kept)

    def remove(self) -> None:
        """Delete the directory."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def remove_stale(root: Path) -> None:
    """Delete this user's run directories under `root` whose server is gone."""
    for path in root.glob(f"{_PREFIX}*/{_LOCK}"):
        try:
            status = path.parent.stat()
            if status.st_uid != os.getuid() or time.time() - status.st_mtime < _YOUNG_SECONDS:
                continue
            descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            continue  # it went away, or belongs to somebody else
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path.parent, ignore_errors=True)
        except BlockingIOError:
            continue  # its server runs
        finally:
            os.close(descriptor)
