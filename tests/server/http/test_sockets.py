"""The client that looks at bytes: what is cut off is an error, never an answer and never waited for."""

from __future__ import annotations

import socket

import pytest
from llmcore_devtools import sockets as raw

WHOLE = b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nbody"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nbody\r\n0\r\n\r\n"


def reply(data: bytes) -> tuple[int, dict[str, str], bytes]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(data)
        theirs.shutdown(socket.SHUT_WR)
        return raw.read_reply(ours)


@pytest.mark.parametrize("data", [WHOLE, CHUNKED])
def test_an_answer_is_whole_or_an_error(data: bytes) -> None:
    assert reply(data)[::2] == (200, b"body")
    for end in range(len(data)):
        with pytest.raises(ConnectionError):
            reply(data[:end])
