"""Health, readiness, metrics and what runs here, from the supervisor's newest word, whichever worker is asked.

Paths and bodies are LightLLM's, with two differences: `/health` answers from what the supervisor sees of the engine
instead of generating tokens, and `/readiness` is 503 while the server is not ready.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib.metadata import version

import falcon
import orjson

from llmcore_server.api import Front, Route
from llmcore_server.status.answers import HealthAnswer, ServerInfoAnswer, StatusAnswer, VersionAnswer


class Resource:
    """Something that the supervisor's newest word tells of."""

    def __init__(self, front: Front) -> None:
        self._front = front


class Health(Resource):
    """200 `{"message": "Ok"}` while requests can be served, else 503 `{"message": "Error"}`."""

    def on_get(self, req: falcon.Request, resp: falcon.Response) -> None:
        """Whether the engine lives and the server takes requests."""
        ready = self._front.state().ready
        _answer(resp, ready, {"message": "Ok" if ready else "Error"})

    on_post = on_get


class Readiness(Resource):
    """200 `{"status": "ok"}` while requests can be served, else 503 and why."""

    def on_get(self, req: falcon.Request, resp: falcon.Response) -> None:
        """Whether to send requests here."""
        state = self._front.state()
        _answer(resp, state.ready, {"status": "ok"} if state.ready else {"status": "error", "reason": state.reason})

    on_post = on_get


class Liveness:
    """200 `{"status": "ok"}` whenever this process answers."""

    def on_get(self, req: falcon.Request, resp: falcon.Response) -> None:
        """Whether a worker answers at all."""
        _answer(resp, True, {"status": "ok"})

    on_post = on_get


class Metrics(Resource):
    """The page of the first metric sink that has one."""

    def on_get(self, req: falcon.Request, resp: falcon.Response) -> None:
        """All figures, at most about a second old."""
        resp.content_type, resp.data = self._front.state().page


class Ping(Resource):
    """200 with an empty body while requests can be served, else 503: the health check of SageMaker and others."""

    def on_get(self, req: falcon.Request, resp: falcon.Response) -> None:
        """The status says whether the server takes requests."""
        resp.status = falcon.HTTP_200 if self._front.state().ready else falcon.HTTP_503

    on_post = on_get


class Version:
    """`{"version": ...}`, llmcore's own."""

    def on_get(self, req: falcon.Request, resp: falcon.Response) -> None:
        """The version of llmcore that serves."""
        _answer(resp, True, {"version": version("llmcore-engine")})


class ServerInfo(Resource):
    """The version, the model, its kernels and KV, the load, the server's processes, its plugins, and every setting
    without its secrets: what the admin listener says too."""

    def on_get(self, req: falcon.Request, resp: falcon.Response) -> None:
        """The server, its model and its settings."""
        resp.content_type = "application/json"
        resp.data = self._front.server_info()


def make(front: Front) -> Iterable[Route]:
    """DialectSpec.make."""
    health = Health(front)
    yield Route("/health", health, answer=HealthAnswer)
    yield Route("/healthz", health, answer=HealthAnswer)
    yield Route("/ping", Ping(front))
    yield Route("/liveness", Liveness(), answer=StatusAnswer)
    yield Route("/readiness", Readiness(front), answer=StatusAnswer)
    yield Route("/metrics", Metrics(front))
    yield Route("/version", Version(), answer=VersionAnswer)
    yield Route("/server_info", ServerInfo(front), answer=ServerInfoAnswer)


def _answer(resp: falcon.Response, ready: bool, body: dict[str, str]) -> None:
    resp.status = falcon.HTTP_200 if ready else falcon.HTTP_503
    resp.content_type = "application/json"
    resp.data = orjson.dumps(body)
