"""The client of a connection, also of one that the process that ends TLS carries."""

from __future__ import annotations

import ipaddress
import os
from functools import lru_cache

_PREFIX = "\0llmcore-tls"
_NETWORK_BITS = 64


def announcement(address: str, port: int) -> str:
    """The name to which the end of TLS binds its own end of a connection to a worker. It holds the client's address.

    The name is in Linux's abstract namespace, so nothing is left of it when the connection closes.
    """
    return f"{_PREFIX}/{os.getpid()}/{port}/{address}"


def announced(name: bytes | str) -> str:
    """The address in the name of a Unix socket's other end, "" if there is none."""
    text = name.decode("ascii", "replace") if isinstance(name, bytes) else name
    return text.split("/", 3)[3] if text.startswith(_PREFIX + "/") and text.count("/") >= 3 else ""


@lru_cache(maxsize=4096)
def network(address: str) -> str:
    """The unit that counts as one client: an IPv4 address, or the whole /64 network of an IPv6 address."""
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return address
    if isinstance(found, ipaddress.IPv4Address):
        return address
    if found.ipv4_mapped is not None:
        return str(found.ipv4_mapped)
    return str(ipaddress.ip_network((found, _NETWORK_BITS), strict=False))
