"""HTTP over bare sockets, for tests that check the bytes of an answer and the time at which its connection closes."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def connect(port: int, timeout: float = 30.0) -> Iterator[socket.socket]:
    """A connection to a server on this machine."""
    with socket.create_connection(("127.0.0.1", port), timeout=timeout) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        yield sock


def request(method: str, path: str, body: Any = None, *, version: str = "1.1", headers: str = "") -> bytes:
    """The bytes of a request; `headers` are whole lines, each with its line end."""
    data = b"" if body is None else json.dumps(body).encode()
    head = f"{method} {path} HTTP/{version}\r\nHost: localhost\r\n{headers}"
    if body is not None:
        head += f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n"
    return head.encode() + b"\r\n" + data


def read_until(sock: socket.socket, text: bytes, times: int = 1, data: bytes = b"") -> bytes:
    """`data` and the bytes after it, until they contain `text` this number of `times`."""
    while data.count(text) < times:
        data += _more(sock, data)
    return data


def _more(sock: socket.socket, data: bytes) -> bytes:
    more = sock.recv(65536)
    if not more:
        raise ConnectionError(f"closed after {data!r}")
    return more


def read_head(sock: socket.socket) -> tuple[int, dict[str, str], bytes]:
    """Status, headers (lower case), and the part of the body that came with them."""
    head, _, rest = read_until(sock, b"\r\n\r\n").partition(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").split("\r\n")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
    return int(first.split()[1]), headers, rest


def read_reply(sock: socket.socket) -> tuple[int, dict[str, str], bytes]:
    """A whole answer with Content-Length, or chunked up to its last chunk."""
    status, headers, body = read_head(sock)
    if headers.get("transfer-encoding") == "chunked":
        while not body.endswith(b"0\r\n\r\n"):
            body += _more(sock, body)
        return status, headers, unchunk(body)
    while len(body) < int(headers["content-length"]):
        body += _more(sock, body)
    return status, headers, body


def unchunk(data: bytes) -> bytes:
    """The body that chunks carry."""
    body = b""
    while data:
        size, _, data = data.partition(b"\r\n")
        n = int(size, 16)
        body, data = body + data[:n], data[n + 2 :]
        if n == 0:
            break
    return body


def call(port: int, method: str, path: str, body: Any = None) -> tuple[int, dict[str, str], bytes]:
    """One request on a connection of its own: status, headers, body."""
    with connect(port) as sock:
        sock.sendall(request(method, path, body))
        return read_reply(sock)
