"""Seeds as clients of several servers send them: any 64-bit number, of which -1 means none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from llmcore.config import Config
from llmcore.text.tokenizer import FastTokenizer
from llmcore_devtools.dialect import Side
from llmcore_tgi.routes import routes as tgi_routes

Post = Callable[[Any], tuple[int, list[int]]]


@pytest.fixture(params=["/v1/chat/completions", "/v1/completions", "/generate", "tgi"])
def post(
    request: pytest.FixtureRequest,
    openai: Callable[..., Side],
    lightllm: Callable[..., Side],
    tokenizer: FastTokenizer,
) -> Post:
    """Sends a seed to a dialect; the status, and the seeds that were submitted."""

    def send(seed: Any) -> tuple[int, list[int]]:
        if request.param == "tgi":
            config = Config(plugin_options={"use_tgi_api": True})
            side = Side.of(tgi_routes, tokenizer, "ok", facts={"config": config})
            result = side.post("/generate", inputs="x", parameters={"seed": seed})
        elif request.param == "/generate":
            side = lightllm("ok")
            result = side.post("/generate", inputs="x", parameters={"seed": seed})
        else:
            side = openai("ok")
            messages = [{"role": "user", "content": "x"}]
            result = side.post(request.param, messages=messages, prompt="x", seed=seed)
        return result.status_code, [submit.sampling.seed for submit in side.bridge.submitted]

    return send


@pytest.mark.parametrize("seed", [0, 1, 2**63 - 1, -2, -(2**63)])
def test_a_seed_is_taken_as_it_is(post: Post, seed: int) -> None:
    assert post(seed) == (200, [seed])


@pytest.mark.parametrize("seed", [-1, None])
def test_minus_one_is_none(post: Post, seed: int | None) -> None:
    (status, (first,)), (_, (second,)) = post(seed), post(seed)
    assert status == 200
    assert first != second and min(first, second) >= 0


@pytest.mark.parametrize("seed", [2**63, -(2**63) - 1, 1.5, "1", True])
def test_what_is_no_seed(post: Post, seed: Any) -> None:
    assert post(seed) == (400, [])
