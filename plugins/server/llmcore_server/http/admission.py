"""Admission to the engine. A worker refuses as early, and as cheaply, as it can.

Only the engine knows the number of waiting requests, and refuses exactly (`llmcore_server.engine.admission`). A worker
refuses earlier what the engine would refuse anyway: it has heard that the queue is full, or it has too many open
requests itself. It checks twice. `Doorman` checks when the head of a request has been read, before its body and before
a thread is taken. `Arrivals` checks before the responder of its route runs, and so finds requests that came before the
news. Access (`llmcore_server.http.access`) is checked first.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace

import falcon
from llmcore.api.errors import RequestError

from llmcore_server.http.access import Door, Entry
from llmcore_server.http.deadlines import NO_KEY, read_terms
from llmcore_server.limits import UNBOUNDED, Bounds, too_many, too_many_of_key
from llmcore_server.messages import Intake


class Gate:
    """One per worker, for any thread. `unready`: the reason why the server takes no requests now, or None."""

    def __init__(self, bounds: Bounds = UNBOUNDED, unready: Callable[[], RequestError | None] = lambda: None) -> None:
        self._bounds = bounds
        self._unready = unready
        self._intake = Intake(full=False, retry_after=1)
        self._vacated = 0
        self._open = 0
        self._clients: Counter[int] = Counter()
        self._lock = threading.Lock()

    @property
    def retry_after(self) -> int:
        """Seconds after which a refused request is worth another try, as the engine says."""
        return self._intake.retry_after

    @property
    def closed(self) -> bool:
        """True while the server takes no requests at all."""
        return self._unready() is not None

    def hear(self, intake: Intake) -> None:
        """The engine's newest word."""
        with self._lock:
            self._intake = intake
            self._vacated = 0

    def vacate(self, choices: int) -> None:
        """The client of this number of choices has left before their end. The engine reported a full queue before it
        heard of that, so the same number may go on to the engine, which decides."""
        with self._lock:
            self._vacated += choices

    def check(self, client: int, choices: int = 1) -> RequestError | None:
        """The reason to refuse another request now, or None."""
        unready = self._unready()
        if unready is not None:
            return unready
        full = self._intake.full and choices > self._vacated
        if full or (self._open and self._open + choices > self._bounds.open):
            return too_many(self._intake.retry_after)
        mine = self._clients[client] if client != NO_KEY else 0
        if mine and mine + choices > self._bounds.per_key:
            return too_many_of_key(self._bounds.per_key, self._intake.retry_after)
        return None

    def enter(self, client: int, choices: int) -> None:
        """Count a request with this number of choices. Raises RequestError if the engine would refuse it."""
        if choices > self._bounds.open:
            raise RequestError(
                f"the request asks for {choices} answers at once; this server takes {self._bounds.open} in all "
                "(--running_max_req_size and --max_waiting_requests): ask for fewer",
                code="invalid_value",
            )
        with self._lock:
            error = self.check(client, choices)
            if error is not None:
                raise error
            self._vacated = max(0, self._vacated - choices)
            self._open += choices
            self._clients[client] += choices

    def leave(self, client: int, choices: int) -> None:
        """Count the end of such a request."""
        with self._lock:
            self._open -= choices
            self._clients[client] -= choices


class Arrivals:
    """Middleware: refuses a request that waits for the engine, before its body is read as JSON."""

    def __init__(self, gate: Gate, queued: frozenset[str]) -> None:
        self._gate = gate
        self._queued = queued

    def process_resource(
        self, req: falcon.Request, resp: falcon.Response, resource: object, params: dict[str, object]
    ) -> None:
        """Falcon's middleware interface: refuse a request that the engine has no room for."""
        if req.method != "POST" or req.uri_template not in self._queued:
            return
        req.context.terms = terms = read_terms(req)
        error = self._gate.check(terms.client)
        if error is not None:
            raise error


class Doorman:
    """Refuses a request by its head: first if the door does not admit it, then if the engine has no room for it.

    So a client without a key does not learn of the queue. `queued`: the paths whose requests wait for the engine.
    """

    def __init__(self, door: Door, gate: Gate, queued: frozenset[str]) -> None:
        self._door = door
        self._gate = gate
        self._queued = queued

    def admit(self, method: str, path: str, headers: Mapping[str, str]) -> Entry:
        """Admit or refuse a request by its head: the door decides first, then the gate."""
        entry = self._door.admit(method, path, headers)
        if entry.error is not None or method != "POST" or path not in self._queued:
            return entry
        error = self._gate.check(entry.client)
        return entry if error is None else replace(entry, error=error)
