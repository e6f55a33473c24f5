"""This process: its limits, the shortages of its machine in words, and its end with its parent."""

from __future__ import annotations

import ctypes
import errno
import os
import re
import resource
import signal
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from llmcore.api.errors import ConfigError, message_of


@dataclass(frozen=True)
class Limit:
    """A limit of this process. `least`: a server cannot start below it."""

    number: int
    name: str
    what: str
    least: int
    unit: int
    raised_by: str

    @property
    def value(self) -> int | None:
        """The limit, in bytes or as a count; None if it is unlimited."""
        soft, _ = resource.getrlimit(self.number)
        return None if soft == resource.RLIM_INFINITY else soft

    def shown(self, value: int) -> str:
        """A value of this limit for a message."""
        if self.unit == 1:
            return f"{value:,}"
        return f"{value / self.unit:,.0f} MiB" if value >= self.unit else f"{value:,} bytes"

    def sentence(self, need: str = "") -> str | None:
        """The limit, `need` and the fix; None if it is unlimited."""
        value = self.value
        if value is None:
            return None
        return f"the {self.what} is limited to {self.shown(value)} ({self.name}){need}; raise it with {self.raised_by}"


MEMORY = Limit(
    resource.RLIMIT_AS,
    "RLIMIT_AS",
    "address space of a process",
    1 << 30,
    1 << 20,
    "`ulimit -v unlimited`, or LimitAS=infinity in a systemd unit",
)
FILE_SIZE = Limit(
    resource.RLIMIT_FSIZE,
    "RLIMIT_FSIZE",
    "size of a file",
    1 << 20,
    1 << 20,
    "`ulimit -f unlimited`, or LimitFSIZE=infinity in a systemd unit",
)
OPEN_FILES = Limit(
    resource.RLIMIT_NOFILE,
    "RLIMIT_NOFILE",
    "number of open files",
    64,
    1,
    "`ulimit -n 65536`, or LimitNOFILE=65536 in a systemd unit",
)

_NO_TEMPORARY = "no temporary directory can be written to; make room in /tmp, or set TMPDIR to a directory that has it"
_OS_ERROR = re.compile(r"\(os error (\d+)\)")
"""An errno in the messages of libraries that are written in Rust."""
_NO_MEMORY = re.compile(
    "failed to map segment|[Cc]annot allocate memory|can't allocate memory|can't start new thread|bad_alloc"
)
"""Messages of the dynamic linker, torch, Python's threads and C++ about missing memory."""


_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """Ask the kernel to kill this process when its parent ends.

    More exactly: when the thread of process `parent` that started this process ends.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)  # the parent had ended before the line above


def check_limits() -> None:
    """Raises ConfigError for a limit under which no server can start.

    Call it before large imports: under such a limit an import may end the process without a message.
    """
    soft, hard = resource.getrlimit(OPEN_FILES.number)
    if 0 <= soft < OPEN_FILES.least and (hard >= OPEN_FILES.least or hard == resource.RLIM_INFINITY):
        resource.setrlimit(OPEN_FILES.number, (OPEN_FILES.least, hard))  # as far as the system allows
    for limit in (MEMORY, FILE_SIZE, OPEN_FILES):
        _check(limit, "a server")


def check_address_space() -> None:
    """Raises ConfigError for an address space in which no command can run. numpy's import waits there for memory, for
    ever and without a word."""
    _check(replace(MEMORY, least=1 << 28), "llmcore")


def _check(limit: Limit, user: str) -> None:
    value = limit.value
    if value is not None and value < limit.least:
        raise ConfigError(limit.sentence(f", and {user} needs {limit.shown(limit.least)} at least"))


def shortage_of(error: BaseException) -> str | None:
    """A sentence that names the resource that ran out, and the fix; None if no error of the chain is about one."""
    for one in _chain(error):
        text = message_of(one)
        if isinstance(one, FileNotFoundError) and "usable temporary directory" in text:
            return _NO_TEMPORARY
        number = getattr(one, "errno", None)
        if (found := _OS_ERROR.search(text)) is not None:
            number = int(found[1])
        if isinstance(one, MemoryError) or _NO_MEMORY.search(text):
            number = errno.ENOMEM
        if number in _SHORTAGES:
            limit, sentence = _SHORTAGES[number]
            return (limit.sentence() if limit else None) or sentence
    return None


def memory_note() -> str:
    """The memory limit, for a message about a process that died or got no memory; "" without a limit."""
    value = MEMORY.value
    if value is None:
        return ""
    return (
        f", with the {MEMORY.what} limited to {MEMORY.shown(value)} ({MEMORY.name}; raise it with {MEMORY.raised_by})"
    )


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    one: BaseException | None = error
    while one is not None and id(one) not in seen:
        seen.add(id(one))
        yield one
        one = one.__cause__ or one.__context__


_SHORTAGES: Mapping[int | None, tuple[Limit | None, str]] = {
    errno.EFBIG: (FILE_SIZE, os.strerror(errno.EFBIG)),
    errno.EMFILE: (OPEN_FILES, os.strerror(errno.EMFILE)),
    errno.ENFILE: (None, "this machine has no open files left; stop what holds many, or raise fs.file-max"),
    errno.ENOMEM: (MEMORY, "this machine, or the container, has no memory left; free some, or give it more"),
    errno.ENOSPC: (None, "there is no room left on the disk; make room, or set TMPDIR to a directory where there is"),
    errno.EDQUOT: (None, "this user's quota of the disk is used up; make room, or set TMPDIR to another disk"),
}
"""errno -> the limit of this process that was exceeded, if it is set, and the sentence if it is not."""
