"""Health, readiness and metrics, answered from the supervisor's newest word, whichever worker is asked.

Paths and bodies are LightLLM's, with two differences: `/health` answers from what the supervisor sees of the engine
instead of generating tokens, and `/readiness` is 503 while the server is not ready.
"""

from __future__ import annotations

from collections.abc import Iterable

import falcon
import orjson

from llmcore.api.http import Front, Route


class Health:
    """200 `{"message": "Ok"}` while requests can be served, else 503 `{"message": "Error"}`."""

    def __init__(self, front: Front) -> None:
        self._front = front

    def on_get(self, req: falcon.Request, resp: falcon.Response) -> None:
        """Whether the engine lives and the server takes requests."""
        ready = self._front.state().ready
        _answer(resp, ready, {"message": "Ok" if ready else "Error"})

    on_post = on_head = on_get


class Readiness:
    """200 `{"status": "ok"}` while requests can be served, else 503 and why."""

    def __init__(self, front: Front) -> None:
        self._front = front

    def on_get(self, req: falcon.Request, resp: falcon.Response) -> None:
        """Whether to send requests here."""
        state = self._front.state()
        _answer(resp, state.ready, {"status": "ok"} if state.ready else {"status": "error", "reason": state.reason})

    on_post = on_head = on_get


class Liveness:
    """200 `{"status": "ok"}` whenever this process answers."""

    def on_get(self, req: falcon.Request, resp: falcon.Response) -> None:
        """Whether a worker answers at all."""
        _answer(resp, True, {"status": "ok"})

    on_post = on_head = on_get


class Metrics:
    """The page of the first metric sink that has one."""

    def __init__(self, front: Front) -> None:
        self._front = front

    def on_get(self, req: falcon.Request, resp: falcon.Response) -> None:
        """All figures, at most about a second old."""
        resp.content_type, resp.data = self._front.state().page

    on_head = on_get


def make(front: Front) -> Iterable[Route]:
    """DialectSpec.make."""
    health = Health(front)
    yield Route("/health", health)
    yield Route("/healthz", health)
    yield Route("/liveness", Liveness())
    yield Route("/readiness", Readiness(front))
    yield Route("/metrics", Metrics(front))


def _answer(resp: falcon.Response, ready: bool, body: dict[str, str]) -> None:
    resp.status = falcon.HTTP_200 if ready else falcon.HTTP_503
    resp.content_type = "application/json"
    resp.data = orjson.dumps(body)
