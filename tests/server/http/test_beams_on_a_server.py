"""Beam searches over a real socket, with the real engine: natively with --beam_mode, and for OpenAI's client."""

from __future__ import annotations

import json
from collections.abc import Iterator

import openai
import pytest
from llmcore_devtools import write_fake_model
from llmcore_devtools.server import RunningServer, serving
from llmcore_devtools.sockets import call
from served import until


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    model = write_fake_model(tmp_path_factory.mktemp("models") / "fake")
    with serving(model, beam_mode=True, max_total_token_num=1000, device="cpu") as running:
        yield running


def test_both_dialects_find_the_same_and_the_best_first(server: RunningServer) -> None:
    parameters = {"best_of": 3, "max_new_tokens": 9, "return_details": True}
    status, _, data = call(server.port, "POST", "/generate", {"inputs": "hello", "parameters": parameters})
    native = json.loads(data)
    assert status == 200 and len(set(native["generated_text"])) == 3
    # every answer has nine tokens, so the sum decides
    sums = [sum(token["logprob"] for token in tokens) for tokens in native["tokens"]]
    assert sums == sorted(sums, reverse=True)
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60)
    answer = client.completions.create(
        model="fake", prompt="hello", n=3, max_tokens=9, extra_body={"use_beam_search": True}
    )
    assert [choice.text for choice in answer.choices] == native["generated_text"]
    stream = client.completions.create(
        model="fake", prompt="hello", max_tokens=9, extra_body={"num_beams": 3}, stream=True
    )
    assert "".join(chunk.choices[0].text for chunk in stream) == native["generated_text"][0]


def test_what_the_engine_refuses_names_the_field(server: RunningServer) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60)
    with pytest.raises(openai.BadRequestError, match="beams"):
        client.completions.create(
            model="fake", prompt="x", max_tokens=900, extra_body={"num_beams": 16, "ignore_eos": True}
        )
    # what the worker tells is the supervisor's newest word, a little old
    until(lambda: json.loads(call(server.port, "GET", "/token_load")[2])["current_load"] == 0)
