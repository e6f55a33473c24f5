"""Requests as bytes, and what the strict reader makes of them."""

from __future__ import annotations

from llmcore_server.http.strict import Bounds, Pool, RequestReader

SMALL = Bounds(head=2000, fields=20, body=1000, chunk_line=100, trailer=200)
CHUNKED = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"


def head(*lines: bytes, first: bytes = b"POST /v1/x HTTP/1.1", host: bool = True) -> bytes:
    return b"\r\n".join([first, *([b"Host: x"] if host else []), *lines, b"", b""])


def read(data: bytes, step: int | None = None, bounds: Bounds = SMALL) -> RequestReader:
    """The request in `data`, which comes in pieces of `step` bytes, and ends with the request."""
    reader = RequestReader(bounds, Pool(1 << 30))
    step = step or len(data)
    for at in range(0, len(data), step):
        piece = data[at : at + step]
        assert not reader.done, f"{len(data) - at} bytes are left over"
        assert reader.feed(piece) == len(piece)
    return reader


def refused(data: bytes, step: int | None = None) -> int:
    """The status with which `data` is refused, whether it comes at once or byte by byte."""
    statuses = []
    for size in (len(data), step or 1):
        reader = RequestReader(SMALL, Pool(1 << 30))
        for at in range(0, len(data), size):
            if reader.done:
                break
            reader.feed(data[at : at + size])
        statuses.append(reader.error.status if reader.error else 0)
    assert statuses[0] == statuses[1]
    return statuses[0]
