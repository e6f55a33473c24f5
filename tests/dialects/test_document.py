"""The OpenAPI document of everything that is built in."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import falcon.testing
import pytest
from llmcore.config import make_config
from llmcore.http.app import build_app
from llmcore.http.worker import dialect_routes
from llmcore.plugins import build_registry
from llmcore.testing.fake_bridge import FakeBridge, fake_front
from llmcore.testing.tokenizer import write_tokenizer
from llmcore.text.tokenizer import load_tokenizer

WITHOUT_BODY = {"/health", "/healthz", "/liveness", "/readiness", "/get_model_name"}


def document(directory: Path, **options: Any) -> dict[str, Any]:
    front = fake_front(FakeBridge(), load_tokenizer(write_tokenizer(directory)))
    front = replace(front, config=replace(front.config, plugin_options=options))
    app = build_app(dialect_routes(build_registry(make_config(plugins=())), front))
    found: dict[str, Any] = falcon.testing.TestClient(app).simulate_get("/openapi.json").json
    return found


@pytest.mark.parametrize("tgi", [False, True])
def test_every_body_has_a_schema(tmp_path: Path, tgi: bool) -> None:
    found = document(tmp_path, use_tgi_api=tgi)
    posts = {path for path, methods in found["paths"].items() if "post" in methods} - WITHOUT_BODY
    assert {"/generate", "/v1/chat/completions", "/v1/completions"} <= posts
    for path in posts:
        assert "requestBody" in found["paths"][path]["post"], path
        schema = found["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        assert schema["$ref"].removeprefix("#/components/schemas/") in found["components"]["schemas"], path
    assert all(operation["summary"] for methods in found["paths"].values() for operation in methods.values())


def test_ranges_are_those_that_are_checked(tmp_path: Path) -> None:
    schemas = document(tmp_path)["components"]["schemas"]
    temperature = schemas["ChatRequest"]["properties"]["temperature"]
    assert {"type": "number", "minimum": 0, "maximum": 2} in temperature["anyOf"]
    assert schemas["ChatRequest"]["required"] == ["messages"]
