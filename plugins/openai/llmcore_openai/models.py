"""GET /v1/models and /v1/models/{id}."""

from __future__ import annotations

import time
from typing import Any

import falcon
import orjson
from llmcore_server.api import Front

from llmcore_openai.sampling import check_model


class Models:
    """The list of models: the one that is served, under each of its names."""

    def __init__(self, front: Front):
        self._front = front
        self._created = int(time.time())

    def entry(self, name: str) -> dict[str, Any]:
        """The served model under one of its names."""
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "llmcore",
            "root": self._front.model_name,
            "max_model_len": self._front.facts.max_total_len,
        }

    def on_get(self, req: falcon.Request, resp: falcon.Response) -> None:
        """The list."""
        resp.content_type = "application/json"
        names = self._front.model_names
        resp.data = orjson.dumps({"object": "list", "data": [self.entry(name) for name in names]})


class Model:
    """One model by its id, which may hold slashes."""

    def __init__(self, front: Front, models: Models):
        self._front = front
        self._models = models

    def on_get(self, req: falcon.Request, resp: falcon.Response, model: str) -> None:
        """The model, or 404."""
        check_model(self._front, model)
        resp.content_type = "application/json"
        resp.data = orjson.dumps(self._models.entry(model))
