"""The private directory of one running server: sockets, log files of its children, a converted tokenizer."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import socket
import tempfile
from pathlib import Path

from llmcore.api.errors import ConfigError

IPC_ROOT = Path("/tmp")
"""As `--zmq_mode ipc:///tmp/` says, whatever TMPDIR is: the path of a socket has room for 107 bytes."""

PREFIX = "llmcore-"
CONTROL = "control"
"""The name of the supervisor's mailbox."""

_LOCK = "lock"


class RunDirectory:
    """A directory with mode 0700 and an unpredictable name, under /tmp or, if it holds no sockets, the system's
    temporary folder. `remove` deletes it.

    The next server removes the directory of a killed one, whose lock is free then, whatever its process namespace was.
    Raises ConfigError if no directory can be made.
    """

    def __init__(self, zmq_mode: str) -> None:
        self._tcp = zmq_mode.startswith("tcp")
        try:
            root = Path(tempfile.gettempdir()) if self._tcp else IPC_ROOT
            remove_stale(root)
            self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=root))
            self._control = self.path / CONTROL
            self._lock = _locked(self.path)
            # systemd-tmpfiles leaves a locked directory, whatever its age: without its sockets nothing can be replaced
            self._hold = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            fcntl.flock(self._hold, fcntl.LOCK_EX)
        except OSError as error:
            fix = "set TMPDIR to a directory" if self._tcp else "--zmq_mode tcp:// needs none there, but TMPDIR"
            raise ConfigError(
                f"no directory can be made for this server's files: {error.strerror or error}; "
                f"make room there and let it be written to, or {fix} where there is"
            ) from error

    @property
    def lost(self) -> bool:
        """True if it or its content was deleted: a new child would not find the supervisor's socket."""
        return not self._tcp and not self._control.is_socket()

    def address(self, name: str) -> str:
        """A ZMQ endpoint for the mailbox called `name`: a socket in this directory, or a free port of loopback."""
        if not self._tcp:
            return f"ipc://{self.path / name}"
        with socket.create_server(("127.0.0.1", 0)) as probe:
            return f"tcp://127.0.0.1:{probe.getsockname()[1]}"

    def log(self, child: str) -> Path:
        """The file for a child's tracebacks and stacks."""
        return self.path / f"{child}.log"

    def keep_log(self, child: str) -> Path | None:
        """Move a child's log file out of the directory, for people to read; None if there is none, or no room."""
        try:
            text = self.log(child).read_bytes()
        except OSError:
            return None
        kept = keep(text, child) if text else None
        if kept is not None:
            self.log(child).unlink(missing_ok=True)
        return kept

    def remove(self) -> None:
        """Delete the directory."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._hold)
        os.close(self._lock)


def keep(text: bytes, name: str) -> Path | None:
    """A file only its owner can read, with `text`, that stays; None where the disk takes none."""
    path: str | None = None
    try:
        descriptor, path = tempfile.mkstemp(prefix=f"{PREFIX}{name}-", suffix=".log")
        with os.fdopen(descriptor, "wb") as file:
            file.write(text)
    except OSError:
        with contextlib.suppress(OSError):
            if path is not None:
                os.unlink(path)
        return None
    return Path(path)


def remove_stale(root: Path) -> None:
    """Delete this user's run directories under `root` whose server is gone."""
    for path in root.glob(f"{PREFIX}*/{_LOCK}"):
        try:
            if path.parent.stat().st_uid != os.getuid():
                continue
            descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            continue  # it went away, or belongs to another user
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path.parent, ignore_errors=True)
        except BlockingIOError:
            continue  # its server runs
        finally:
            os.close(descriptor)


def _locked(directory: Path) -> int:
    """The descriptor of the directory's lock, which is held before others can see it."""
    hidden = directory / f"{_LOCK}.new"
    descriptor = os.open(hidden, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    hidden.rename(directory / _LOCK)
    return descriptor
