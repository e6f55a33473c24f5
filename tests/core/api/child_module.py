"""A child for test_child_pool.py: it does what the question's first word says."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable

from llmcore.api.child_pool import serve

kept: list[bytes] = []


def begin(opening: bytearray) -> Callable[[bytearray], bytes]:
    if opening == b"fail":
        raise ValueError
    if opening == b"wait":
        time.sleep(600)

    def answer_to(question: bytearray) -> bytes:
        word, _, rest = bytes(question).partition(b" ")
        if word == b"burn":
            while True:
                pass
        if word == b"sleep":
            time.sleep(600)
        if word == b"grow":
            return str(len(b"x" * int(rest))).encode()
        if word == b"keep":
            kept.append(b"x" * int(rest))
        if word == b"crash":
            signal.raise_signal(signal.SIGSEGV)  # in this thread, so that no answer follows
        if word == b"exit":
            sys.exit()
        if word == b"stack":
            return str(threading.stack_size()).encode()
        return opening + b" " + str(os.getpid()).encode() + b" " + rest

    return answer_to


if __name__ == "__main__":
    serve(begin, stack_bytes=1 << 20)
