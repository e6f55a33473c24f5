"""Who may use the server: API keys, and web pages of other origins. Middleware, so no route can be forgotten."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
from collections.abc import Iterator, Sequence

import falcon

from llmcore.config import Access
from llmcore.errors import RequestError

OPEN_PATHS = frozenset({"/health", "/healthz", "/liveness", "/readiness"})
"""What is answered without a key: whoever restarts or balances servers has none."""

EXPOSED = "x-request-id, retry-after"
"""Headers of answers that scripts of other origins may read."""

MAX_AGE_SECONDS = 600
"""How long a browser may remember a preflight's answer."""


class ApiKeys:
    """Refuses every request without one of the keys, whatever its path, with 401.

    A key is compared by its SHA-256 digest, and with every key there is, so that the time taken says nothing of it.
    """

    def __init__(self, keys: Sequence[str], open_paths: frozenset[str] = OPEN_PATHS) -> None:
        self._digests = [_digest(key) for key in keys]
        self._open_paths = open_paths

    def process_request(self, req: falcon.Request, resp: falcon.Response) -> None:
        """Falcon's middleware interface."""
        if resp.complete or req.path in self._open_paths:
            return
        client = self.client(req.get_header("Authorization") or "")
        if client >= 0:
            req.context.client = client
            return
        resp.set_header("WWW-Authenticate", "Bearer")
        raise RequestError(
            "This server needs an API key: send the header Authorization: Bearer KEY.",
            code="invalid_api_key",
            status=401,
        )

    def client(self, authorization: str) -> int:
        """Which key the header brings, counted from 0; -1 for none of them."""
        given = _digest(_bearer(authorization))
        return max((i for i, known in enumerate(self._digests) if hmac.compare_digest(given, known)), default=-1)


class Cors:
    """Lets web pages of the listed origins call the server, as the fetch standard says.

    Comes before `ApiKeys`, because preflights carry no key and pages should be able to read a 401.
    """

    def __init__(self, access: Access) -> None:
        self._access = access
        self._any = "*" in access.allow_origins
        self._origins = frozenset(origin.rstrip("/") for origin in access.allow_origins)

    def process_request(self, req: falcon.Request, resp: falcon.Response) -> None:
        """Falcon's middleware interface."""
        if not self._any:
            resp.append_header("Vary", "Origin")
        origin = req.get_header("Origin")
        if origin is None or not (self._any or origin in self._origins):
            return
        for name, value in self._answer(origin):
            resp.set_header(name, value)
        method = req.get_header("Access-Control-Request-Method")
        if req.method == "OPTIONS" and method is not None:
            for name, value in self._preflight(method, req.get_header("Access-Control-Request-Headers") or ""):
                resp.set_header(name, value)
            resp.status = falcon.HTTP_204
            resp.complete = True

    def _answer(self, origin: str) -> Iterator[tuple[str, str]]:
        yield "Access-Control-Allow-Origin", "*" if self._any else origin
        yield "Access-Control-Expose-Headers", EXPOSED
        if self._access.allow_credentials:
            yield "Access-Control-Allow-Credentials", "true"

    def _preflight(self, method: str, headers: str) -> Iterator[tuple[str, str]]:
        # What was asked for, where everything is allowed: a literal * covers neither Authorization nor credentials.
        methods, allowed = self._access.allow_methods, self._access.allow_headers
        yield "Access-Control-Allow-Methods", method if "*" in methods else ", ".join(methods)
        yield "Access-Control-Allow-Headers", headers if "*" in allowed else ", ".join(allowed)
        yield "Access-Control-Max-Age", str(MAX_AGE_SECONDS)


class SameOrigin:
    """For the admin listener: 403 for a browser's `Origin` that is not the address asked for.

    Where there may be no keys (`loopback`), a name for which anybody could answer is refused too: a page of evil.test
    is of the same origin as this server, once evil.test resolves to 127.0.0.1.
    """

    def __init__(self, *, loopback: bool) -> None:
        self._loopback = loopback

    def process_request(self, req: falcon.Request, resp: falcon.Response) -> None:
        """Falcon's middleware interface."""
        host, origin = req.get_header("Host") or "", req.get_header("Origin")
        if origin is not None and origin.partition("://")[2].lower() != host.lower():
            raise RequestError("Web pages of other origins may not use the admin listener.", status=403)
        if self._loopback and not is_local_name(host):
            raise RequestError(
                "The admin listener is called by its address here: 127.0.0.1 or localhost in Host.", status=403
            )


def middleware(access: Access, open_paths: frozenset[str] = OPEN_PATHS) -> list[Cors | ApiKeys]:
    """What `access` asks for, in the order in which it has to be asked; no key is needed for `open_paths`."""
    found: list[Cors | ApiKeys] = []
    if access.allow_origins:
        found.append(Cors(access))
    if access.api_keys:
        found.append(ApiKeys(access.api_keys, open_paths))
    return found


def _bearer(authorization: str) -> str:
    scheme, _, key = authorization.partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


def fingerprint(key: str) -> str:
    """What logs call a key: enough to tell one from another, and nothing to get in with."""
    return _digest(key).hex()[:8]


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def is_local_name(host: str) -> bool:
    """Whether `host` (as in a Host header) is an address or localhost."""
    name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
    if name.lower() == "localhost":
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
