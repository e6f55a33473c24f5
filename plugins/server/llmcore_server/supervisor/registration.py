"""Tells the proxy of `--proxy_url` that this server is ready, and that it ends, in LMDeploy's protocol for nodes.

A proxy that has started again may know no server. So a registered server asks now and then whether it is still known.
"""

from __future__ import annotations

import http.client
import logging
import socket
import threading
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlencode, urlsplit

import orjson

from llmcore_server.settings import Registration

logger = logging.getLogger(__name__)

FIRST_PAUSE = 1.0
"""Seconds until the second attempt. Every further pause is twice as long, up to LONGEST_PAUSE."""

LONGEST_PAUSE = 5.0
"""Also the seconds between two questions whether the proxy still knows this server. A proxy that starts again gets no
requests answered until its servers are back, so they look for it as often as it asks for their health."""

REQUEST_SECONDS = 5.0
"""The time that the proxy has for each part of an answer."""

FAREWELL_SECONDS = 1.0
"""The longest time that the end of this server waits for the proxy, which until then sends requests here."""

UNSPECIFIED = ("0.0.0.0", "::", "")

MOST_BYTES = 1 << 20
"""LMDeploy's proxy answers with the status of all its nodes."""

HYBRID = 1
"""LMDeploy's role of a server that both reads prompts and answers."""


class Registered:
    """A server's time at the proxy. Without `proxy_url` nothing happens. `host`: the address that it listens on."""

    def __init__(self, settings: Registration, host: str) -> None:
        self._settings, self._host = settings, host
        self._ends = threading.Event()
        self._gone = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self, url: str, models: Sequence[str]) -> None:
        """Register from now on, on a thread of its own.

        `url`: how clients on this machine reach the server. `models`: the names that it serves.
        """
        if self._settings.proxy_url is not None and self._thread is None:
            self._thread = threading.Thread(target=self._run, args=(url, models), name="registration", daemon=True)
            self._thread.start()

    def end(self) -> None:
        """Have the proxy send nothing more, and wait until it knows, but not for long."""
        self._ends.set()
        if self._thread is not None:
            self._gone.wait(FAREWELL_SECONDS)

    def _run(self, url: str, models: Sequence[str]) -> None:
        proxy = self._settings.proxy_url or ""
        pause, told, mine = FIRST_PAUSE, False, None
        while not self._ends.is_set():
            try:
                if mine is None or not self._is_known(mine):
                    mine = None
                    found = self._settings.node_url or own_url(url, self._host, proxy)
                    self._add(found, models)
                    mine = found
                    logger.info("registered at %s as %s", proxy, mine)
                pause, told = FIRST_PAUSE, False
                self._ends.wait(LONGEST_PAUSE)
            except (OSError, http.client.HTTPException) as error:
                if not told:
                    logger.warning("cannot register at %s, and try again until it works: %s", proxy, error)
                told = True
                self._ends.wait(pause)
                pause = min(2 * pause, LONGEST_PAUSE)
        if mine is not None:
            self._deregister(mine)
        self._gone.set()

    def _add(self, mine: str, models: Sequence[str]) -> None:
        answer = self._ask("POST", "/nodes/add", {"url": mine, "status": {"models": [*models], "role": HYBRID}})
        _check_success(answer)

    def _is_known(self, mine: str) -> bool:
        """True if the proxy lists this server, be it as removed. LMDeploy's proxy lists all, whatever is asked."""
        answer = self._ask("GET", "/nodes/status?" + urlencode({"url": mine}))
        try:
            return mine in orjson.loads(answer)
        except (orjson.JSONDecodeError, TypeError) as error:
            raise http.client.HTTPException(f"no list of nodes: {_short(answer)}") from error

    def _deregister(self, mine: str) -> None:
        try:
            _check_success(self._ask("POST", "/nodes/remove", {"url": mine}))
        except (OSError, http.client.HTTPException) as error:
            logger.warning("cannot deregister at %s: %s", self._settings.proxy_url, error)

    def _ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> bytes:
        """The body of the proxy's answer. Raises OSError or HTTPException if its status is not 200."""
        parts = urlsplit(self._settings.proxy_url or "")
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        connection = kind(parts.hostname or "", parts.port, timeout=REQUEST_SECONDS)
        headers = {"Content-Type": "application/json"}
        if self._settings.proxy_key is not None:
            headers["Authorization"] = f"Bearer {self._settings.proxy_key}"
        try:
            sent = None if body is None else orjson.dumps(body)
            connection.request(method, parts.path.rstrip("/") + path, sent, headers)
            response = connection.getresponse()
            answer = response.read(MOST_BYTES)
        finally:
            connection.close()
        if response.status != 200:
            raise http.client.HTTPException(f"{response.status} {_short(answer)}")
        return answer


def _check_success(answer: bytes) -> None:
    """Raises HTTPException. LMDeploy's proxy says with status 200, too, that it failed."""
    if b"success" not in answer.lower():
        raise http.client.HTTPException(_short(answer))


def _short(answer: bytes) -> str:
    return answer.decode("utf-8", "replace")[:500]


def own_url(url: str, host: str, proxy: str) -> str:
    """The URL under which the proxy reaches a server that listens on `host`. `url`: how clients here reach it.

    A server that listens on every address is reached at the one from which it reaches the proxy. Raises OSError if it
    does not.
    """
    if host not in UNSPECIFIED:
        return url
    parts = urlsplit(proxy)
    found = socket.getaddrinfo(parts.hostname, parts.port or 80, type=socket.SOCK_DGRAM)
    family, kind, _, _, address = found[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)  # sends nothing, but the kernel chooses the way
        mine = str(probe.getsockname()[0])
    scheme, _, rest = url.partition("://")
    return f"{scheme}://{f'[{mine}]' if ':' in mine else mine}:{rest.rpartition(':')[2]}"
