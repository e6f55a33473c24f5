"""Access by the head of a request: the admin's key for /nodes/*, the clients' keys for the rest."""

from __future__ import annotations

from collections.abc import Mapping

from llmcore.api import RequestError
from llmcore_server.listening import NO_KEY, ApiKeys, App, Entry, SameOrigin

NODES = "/nodes"
"""Nothing below this path ever reaches a node."""


class RouterDoor:
    """Admits or refuses requests. `admin_key`: None if the client's address decides, in the resource. `guard`: it
    checks hosts, before keys."""

    def __init__(self, app: App, admin_key: str | None, guard: SameOrigin | None) -> None:
        self._app = app
        self._guard = guard
        self._admin = ApiKeys((admin_key,)) if admin_key is not None else None

    def admit(self, method: str, path: str, headers: Mapping[str, str]) -> Entry:
        """See llmcore_server.http.access.Admit."""
        if not is_admin(path):
            return self._app.admit(method, path, headers)
        error = self._guard.check(headers) if self._guard is not None else None
        if error is None and "ORIGIN" in headers:
            error = _web_page()
        if error is None and self._admin is not None and self._admin.client(headers) == NO_KEY:
            error = _no_admin_key()
        return Entry(error)


def is_admin(path: str) -> bool:
    """True for the paths by which nodes come and go."""
    return path == NODES or path.startswith(f"{NODES}/")


def _web_page() -> RequestError:
    return RequestError("Web pages may not change the nodes.", status=403)


def _no_admin_key() -> RequestError:
    return RequestError(
        "This path needs the key of --admin_key: send the header Authorization: Bearer KEY.",
        code="invalid_api_key",
        status=401,
    )
