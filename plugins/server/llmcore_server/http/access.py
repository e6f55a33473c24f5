"""Access by the head of a request alone: API keys, web pages of other origins, host names, and the client's address.

`Door` decides, in one place, for every path. The HTTP server (`streaming`) asks it as soon as it has read the head of
a request, so it keeps nothing of the body of a request without a key.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import os
import socket
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from llmcore.api.errors import RequestError
from llmcore.config import Config

from llmcore_server.http.deadlines import NO_KEY
from llmcore_server.settings import Access, Server, is_loopback

Headers = tuple[tuple[str, str], ...]
"""Names and values of an answer's headers."""


@dataclass(frozen=True, slots=True)
class Entry:
    """The decision. `error`: the refusal; None for a request that is admitted.

    `client`: the number of its API key, NO_KEY without one. `keyless`: the request needs no key even if the server has
    keys, so the server keeps nothing of its body. `preflight`: a browser asks whether a page may send a request, and
    `headers` are the whole answer. `headers`: headers of every answer to the request.
    """

    error: RequestError | None = None
    client: int = NO_KEY
    keyless: bool = False
    preflight: bool = False
    headers: Headers = ()

    @property
    def keeps_body(self) -> bool:
        """False if no responder will ever read the body."""
        return self.error is None and not self.keyless


ENTRY = "llmcore.entry"
"""The key of WSGI's environment under which the Entry of a request is."""

ANYBODY = Entry()
"""The entry of every request to a server that asks for nothing."""

Admit = Callable[[str, str, Mapping[str, str]], Entry]
"""Decides about a request by its method, path and headers (under CGI's names: "X_REQUEST_ID"). The main loop calls it,
before the body is read and before a thread is taken, so it must not block."""


def admit_anybody(method: str, path: str, headers: Mapping[str, str]) -> Entry:
    """An Admit that refuses nothing."""
    return ANYBODY


OPEN_PATHS = frozenset({"/health", "/healthz", "/liveness", "/ping", "/readiness"})
"""Paths that need no key, because the programs that restart or balance servers have none."""

EXPOSED = "x-request-id, retry-after, x-llmcore-unenforced"
"""Headers of answers that scripts of other origins may read."""

MAX_AGE_SECONDS = 600
"""The time for which a browser may remember a preflight's answer."""

DOCKER_HOST = "host.docker.internal"
"""The name that a container has for the machine it runs on."""

_ANY = "*"


class ApiKeys:
    """Finds the client of a request by its key, in `Authorization: Bearer KEY` or else in `x-api-key: KEY`.

    A key is compared by its SHA-256 digest, and with every key there is, so that the time taken says nothing of it.
    """

    def __init__(self, keys: Sequence[str]) -> None:
        self._digests = [_digest(key) for key in keys]

    def client(self, headers: Mapping[str, str]) -> int:
        """The number of the key in a request's headers (under CGI's names), from 0; NO_KEY for none of them."""
        client = self._find(_bearer(headers.get("AUTHORIZATION", "")))
        return self._find(headers.get("X_API_KEY", "")) if client == NO_KEY else client

    def _find(self, key: str) -> int:
        if not key:
            return NO_KEY
        given = _digest(key)
        return max((i for i, known in enumerate(self._digests) if hmac.compare_digest(given, known)), default=NO_KEY)


class Cors:
    """Lets web pages of the listed origins call the server, as the fetch standard says."""

    def __init__(self, access: Access) -> None:
        self._access = access
        self._any = _ANY in access.allow_origins
        self._origins = frozenset(_origin(origin) for origin in access.allow_origins)
        self._vary: Headers = () if self._any else (("Vary", "Origin"),)

    def answer(self, method: str, headers: Mapping[str, str]) -> tuple[Headers, bool]:
        """The headers of every answer to a request, and whether it is a preflight, which they answer."""
        origin = headers.get("ORIGIN")
        if origin is None or not (self._any or _origin(origin) in self._origins):
            return self._vary, False
        answer = (
            *self._vary,
            ("Access-Control-Allow-Origin", _ANY if self._any else origin),
            ("Access-Control-Expose-Headers", EXPOSED),
            *([("Access-Control-Allow-Credentials", "true")] if self._access.allow_credentials else []),
        )
        asked = headers.get("ACCESS_CONTROL_REQUEST_METHOD")
        if method != "OPTIONS" or asked is None:
            return answer, False
        return (*answer, *self._preflight(asked, headers.get("ACCESS_CONTROL_REQUEST_HEADERS", ""))), True

    def _preflight(self, method: str, headers: str) -> Headers:
        # Name what was asked for if everything is allowed: a literal * covers neither Authorization nor credentials.
        methods, allowed = self._access.allow_methods, self._access.allow_headers
        return (
            ("Access-Control-Allow-Methods", method if _ANY in methods else ", ".join(methods)),
            ("Access-Control-Allow-Headers", headers if _ANY in allowed else ", ".join(allowed)),
            ("Access-Control-Max-Age", str(MAX_AGE_SECONDS)),
        )


class HostNames:
    """The names under which clients may call a listener that does not ask for keys.

    Every address is one of them, and so are localhost and the machine's own names. Any other name may be that of an
    attacker: a web page of evil.test has the same origin as this server as soon as evil.test resolves to 127.0.0.1.
    """

    def __init__(self, allowed: Collection[str]) -> None:
        self._any = _ANY in allowed
        self._names = frozenset(name.lower() for name in (*allowed, DOCKER_HOST, socket.gethostname()))
        # The whole name may be known to a name server only, which can take many seconds to answer.
        threading.Thread(target=self._find_whole_name, name="own name", daemon=True).start()

    def __contains__(self, host: str) -> bool:
        """True if a `Host` header, with or without a port, names this machine."""
        return self._any or is_local_name(host) or _name(host) in self._names

    def _find_whole_name(self) -> None:
        self._names |= {socket.getfqdn().lower()}


class SameOrigin:
    """Refuses (403) requests of web pages of other origins, and requests under names that are not this machine's.

    `hosts`: the names that `Host` may have; None for any. `origins`: the origins whose pages may send requests beside
    the server's own; None if no option adds one. Only browsers send `Origin`, so other clients pass without it.
    """

    def __init__(self, hosts: HostNames | None, origins: Collection[str] | None = None) -> None:
        self._hosts = hosts
        self._origins = frozenset(_origin(origin) for origin in origins or ())
        self._trusted = frozenset(origin.partition("://")[2] for origin in self._origins)
        self._remedy = "" if origins is None else "; --allow_origins lists those that may"

    def check(self, headers: Mapping[str, str]) -> RequestError | None:
        """Why a request with these headers (under CGI's names) is refused."""
        host, origin = headers.get("HOST"), headers.get("ORIGIN")
        if _ANY in self._origins:
            return None
        # every browser names a host; the probe of a load balancer may not
        if host is not None and self._hosts is not None and not (host in self._hosts or host.lower() in self._trusted):
            return RequestError(
                f"This server is not known as {host[:100]}: use its address or localhost, or name the host in "
                "--allowed_hosts.",
                status=403,
            )
        if origin is None or _origin(origin) in self._origins:
            return None
        if host is not None and origin.partition("://")[2].lower() == host.lower():
            return None
        return RequestError(f"Web pages of {origin[:100]} may not use this server{self._remedy}.", status=403)


class Door:
    """Admits or refuses a request by its head. `open_paths` need no key; `guard` is asked before keys are."""

    def __init__(
        self, access: Access, *, open_paths: frozenset[str] = OPEN_PATHS, guard: SameOrigin | None = None
    ) -> None:
        self._cors = Cors(access) if access.allow_origins else None
        self._guard = guard
        self._open_paths = open_paths
        self._keys = ApiKeys(access.api_keys) if access.api_keys else None

    def admit(self, method: str, path: str, headers: Mapping[str, str]) -> Entry:
        """See Admit. A page of an allowed origin can read a refusal too: the entry has the headers for that."""
        answer, preflight = self._cors.answer(method, headers) if self._cors is not None else ((), False)
        error = self._guard.check(headers) if self._guard is not None else None
        if error is not None:
            return Entry(error, headers=answer)
        if preflight or path in self._open_paths:  # a preflight never brings a key
            return Entry(keyless=True, preflight=preflight, headers=answer)
        if self._keys is None:
            return Entry(headers=answer) if answer else ANYBODY
        client = self._keys.client(headers)
        return Entry(_no_key() if client == NO_KEY else None, client, headers=answer)


def server_guard(config: Config) -> SameOrigin | None:
    """The guard of the server itself, or None. It has one on loopback without keys, because web pages can reach it
    there though strangers cannot, and wherever the operator lists hosts."""
    access = config.section(Access)
    if access.allowed_hosts or (is_loopback(config.section(Server).host) and not access.api_keys):
        return SameOrigin(HostNames(access.allowed_hosts), access.allow_origins)
    return None


def admin_guard(config: Config) -> SameOrigin:
    """The guard of the admin listener. Its dashboard is a page of its own origin; no other page may use it."""
    access = config.section(Access)
    asked = access.allowed_hosts or is_loopback(config.section(Server).admin_host)
    return SameOrigin(HostNames(access.allowed_hosts) if asked else None)


def fingerprint(key: str) -> str:
    """The name of a key in logs. It tells keys apart, and no client can use it as a key."""
    return _digest(key).hex()[:8]


def is_local_name(host: str) -> bool:
    """True if `host` (as in a Host header) is an address or localhost."""
    name = _name(host)
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _name(host: str) -> str:
    """`host` without its port and the dot of a whole name, in lower case."""
    name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
    return name.lower().removesuffix(".")


def _origin(text: str) -> str:
    return text.rstrip("/").lower()


def _no_key() -> RequestError:
    return RequestError(
        "This server needs an API key: send the header Authorization: Bearer KEY, or x-api-key: KEY.",
        code="invalid_api_key",
        status=401,
    )


def _bearer(authorization: str) -> str:
    scheme, _, key = authorization.partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


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
