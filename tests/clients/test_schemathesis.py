"""Thousands of requests made from our own OpenAPI document: none may end in a 5xx, or in nothing."""

from __future__ import annotations

import re
import urllib.request
from pathlib import Path

import pytest
from llmcore_devtools.server import serving

from .conftest import Tool

EXAMPLES, LEAST = 10, 4000
"""Made at random for each operation; and cases in all, most of them from the coverage phase. Their number does not
depend on how long they take."""

NOT_IMPLEMENTED = "^/api/(blobs|copy|create|delete|pull|push)"
"""What Ollama does with its store of models is a 501 here."""


@pytest.mark.parametrize("tgi", [False, True])
def test_no_server_error(small_model: Path, tool: Tool, tgi: bool) -> None:
    short = {"max_req_total_len": 64} if tgi else {}  # its answers are as long as fits, unless a request says
    options = {"use_tgi_api": tgi}
    with serving(small_model, data_type="fp32", device="cpu", plugin_options=options, **short) as running:
        schemathesis(running.url, tool)


def schemathesis(url: str, tool: Tool) -> None:
    document = f"{url}/openapi.json"
    fixed = ("--generation-deterministic", "--seed", "1")
    # One worker: in Python 3.11 a thread that compiles source disturbs the count of another one's recursion, and
    # Hypothesis compiles that of lambdas.
    budget = ("--max-examples", str(EXAMPLES), "--request-timeout", "30", "--workers", "1", *fixed)
    rules = ("--phases", "coverage,fuzzing", "--checks", "not_a_server_error", "--suppress-health-check", "all")
    rules += ("--exclude-path-regex", NOT_IMPLEMENTED)
    said = tool.run(
        "schemathesis", "run", document, *rules, *budget, "--continue-on-failure", "--no-color", timeout=900
    )
    [(generated, passed)] = re.findall(r"([\d,]+) generated, ([\d,]+) passed", said)
    assert generated == passed
    assert int(generated.replace(",", "")) >= LEAST, said
    with urllib.request.urlopen(f"{url}/health", timeout=10) as answer:
        assert answer.status == 200
