"""Thousands of requests made from our own OpenAPI document: none may end in a 5xx, or in nothing."""

from __future__ import annotations

import re
import urllib.request

from llmcore.testing.server import RunningServer

from .conftest import Tool


def test_no_server_error(small_server: RunningServer, tool: Tool) -> None:
    document = f"{small_server.url}/openapi.json"
    budget = ("--max-time", "60", "--request-timeout", "30", "--workers", "2", "--seed", "1")
    rules = ("--phases", "coverage,fuzzing", "--checks", "not_a_server_error", "--suppress-health-check", "all")
    said = tool.run("schemathesis", "run", document, *rules, *budget, "--continue-on-failure", "--no-color")
    [(generated, passed)] = re.findall(r"([\d,]+) generated, ([\d,]+) passed", said)
    assert generated == passed
    assert int(generated.replace(",", "")) >= 2000, said
    with urllib.request.urlopen(f"{small_server.url}/health", timeout=10) as answer:
        assert answer.status == 200
