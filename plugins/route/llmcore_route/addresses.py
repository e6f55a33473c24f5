"""Addresses of nodes: which ones the operator allows, and which ones a request never reaches."""

from __future__ import annotations

import ipaddress
import socket
import ssl
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from urllib.parse import urlsplit

from llmcore.api import ConfigError, RequestError

METADATA = frozenset({"100.100.100.200", "fd00:ec2::254"})
"""Services of clouds that tell a machine its secrets, and whose addresses are not link-local."""

KEEP_ALIVE = {"TCP_KEEPIDLE": 15, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
"""Seconds of silence until the kernel asks a node's machine if it lives, seconds between two questions, and the number
of questions without an answer after which it does not. A machine that lost its power closes no connection."""

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


@dataclass(frozen=True)
class Place:
    """The parts of a node's URL. `base`: the beginning of every path there, "" for none."""

    secure: bool
    host: str
    port: int
    base: str = ""


class Allowed:
    """The hosts of `--route_nodes`: those that may be nodes and, without an admin key, may add and remove them.

    Raises ConfigError for a text that is neither HOST nor HOST:PORT.
    """

    def __init__(self, texts: Iterable[str]) -> None:
        self._entries = tuple(_entry(text) for text in texts)

    def __bool__(self) -> bool:
        return bool(self._entries)

    def node(self, place: Place) -> bool:
        """True if a node may be there. Any place is fine if no host is listed."""
        return not self._entries or any(
            host == place.host and port in (None, place.port) for host, port in self._entries
        )

    def client(self, address: str) -> bool:
        """True if a client with this address is one of the hosts. It looks names up, so it may block for seconds."""
        asked = _plain(address)
        hosts = {host for host, _ in self._entries}
        return any(asked == found for host in hosts for found, _, _ in _looked_up(host, 0))


def place_of(url: str) -> Place:
    """The place of a node's URL. Raises RequestError (400) for a URL that no node can have."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:  # an open bracket, an invalid port
        host = port = None
        parts = None
    plain = url.isascii() and url.isprintable() and " " not in url and "\\" not in url
    if parts is None or not host or not plain or parts.scheme not in ("http", "https"):
        raise _refused(f"{url[:100]!a} is not the URL of a node; write http://HOST:PORT")
    if parts.query or parts.fragment or "@" in parts.netloc:
        raise _refused("the URL of a node has neither a user, nor a query, nor a fragment; write http://HOST:PORT")
    secure = parts.scheme == "https"
    return Place(secure, host, port or (443 if secure else 80), parts.path.rstrip("/"))


def check(place: Place, allowed: Allowed) -> None:
    """Raises RequestError (400 or 403) for a place that is not to be a node."""
    if not allowed.node(place):
        raise RequestError(f"{place.host}:{place.port} is not listed in --route_nodes.", param="url", status=403)
    found = list(_looked_up(place.host, place.port))
    if not found:
        raise _refused(f"the name {place.host} has no address; give the node's address")
    for address, _, _ in found:
        if forbidden(address):
            raise _refused(
                f"{place.host} means {address}, which is not the address of a node; have the node register under an "
                "address that this machine reaches (LMDeploy: --server-name, llmcore: --node_url)"
            )


def forbidden(address: Address) -> bool:
    """True for an address that no node has: the unspecified, link-local ones, groups, services of clouds."""
    special = address.is_unspecified or address.is_link_local or address.is_multicast
    return special or str(address) in METADATA


def dial(place: Place, seconds: float) -> socket.socket:
    """A connection to a node, made within about `seconds` for each of its addresses. Raises OSError.

    A name is looked up and checked every time, because it may mean another address than when the node was added.
    """
    problem: OSError = ConnectionError(f"the name {place.host} has no address")
    for address, family, target in _looked_up(place.host, place.port):
        if forbidden(address):
            raise ConnectionError(f"{place.host} means {address} now")
        connection = socket.socket(family, socket.SOCK_STREAM)
        try:
            connection.settimeout(seconds)
            connection.connect(target)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in KEEP_ALIVE.items():
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
            return _tls().wrap_socket(connection, server_hostname=place.host) if place.secure else connection
        except OSError as error:
            connection.close()
            problem = error
    raise problem


@cache
def _tls() -> ssl.SSLContext:
    return ssl.create_default_context()


def _looked_up(host: str, port: int) -> Iterator[tuple[Address, socket.AddressFamily, tuple[str, int]]]:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return
    for family, _, _, _, target in found:
        yield _plain(str(target[0])), family, target  # type: ignore[misc]


def _plain(text: str) -> Address:
    """The address, as IPv4 where it is IPv4 in the clothes of IPv6."""
    address = ipaddress.ip_address(text.partition("%")[0])
    return getattr(address, "ipv4_mapped", None) or address


def _entry(text: str) -> tuple[str, int | None]:
    bare = text if text.startswith("[") or text.count(":") < 2 else f"[{text}]"
    try:
        parts = urlsplit(f"//{bare}")
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
        parts = None
    if not host or parts is None or parts.path or "@" in parts.netloc:
        raise ConfigError(f"--route_nodes {text}: write HOST or HOST:PORT")
    return host, port


def _refused(why: str) -> RequestError:
    return RequestError(f"url: {why}.", param="url", code="invalid_value")
