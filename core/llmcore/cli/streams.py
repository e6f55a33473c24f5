"""The standard streams of a command, which may be missing, full or without a reader."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from typing import Any

_STDERR = 2


class _StandardError(io.FileIO):
    """Standard error on which printing never raises."""

    def write(self, data: Any) -> int:
        """Write `data`. Returns its whole length, even if some of it is lost."""
        size = len(data)
        with contextlib.suppress(OSError):  # the disk is full, or the reader has gone
            while data:
                data = data[os.write(_STDERR, data) :]
        return size


def guard_standard_streams() -> None:
    """Make printing on standard error never raise, and open missing standard descriptors as /dev/null.

    Without /dev/null a socket could get the number of a missing descriptor, and its client would receive our log.
    """
    for number, stream in enumerate((sys.__stdin__, sys.__stdout__, sys.__stderr__)):
        if stream is None:
            with contextlib.suppress(OSError):
                null = os.open(os.devnull, os.O_RDWR)
                os.set_inheritable(null, True)
                if null != number:
                    os.dup2(null, number)
                    os.close(null)
    own = sys.__stderr__
    if own is not None and sys.stderr is own:
        raw = _StandardError(_STDERR, "w", closefd=False)
        sys.stderr = io.TextIOWrapper(raw, own.encoding, "backslashreplace", write_through=True)
