"""--token_healing_mode over a real socket, with the real engine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from llmcore.text.tokenizer import FastTokenizer, load_tokenizer
from llmcore_devtools import fake_answer, write_fake_model
from llmcore_devtools.server import RunningServer, serving
from llmcore_devtools.sockets import call
from llmcore_devtools.tokenizer import write_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> FastTokenizer:
    return load_tokenizer(write_tokenizer(tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    model = write_fake_model(tmp_path_factory.mktemp("models") / "fake")
    with serving(model, token_healing_mode=True, max_total_token_num=1000, device="cpu") as running:
        yield running


def ask(server: RunningServer, path: str, body: dict[str, Any]) -> dict[str, Any]:
    status, _, data = call(server.port, "POST", path, body)
    assert status == 200, data
    answer: dict[str, Any] = json.loads(data)
    return answer


@pytest.mark.parametrize("text", ["say the", "stop in", "x", "éa", "ab"])
def test_the_answer_goes_on_where_the_prompt_ends(server: RunningServer, tokenizer: FastTokenizer, text: str) -> None:
    body = {"inputs": text, "parameters": {"max_new_tokens": 8, "return_details": True, "ignore_eos": True}}
    answer = ask(server, "/generate", body)
    ids = tokenizer.encode(text)
    drawn = [token["id"] for token in answer["tokens"]]
    removed = next(n for n in (2, 1, 0) if n < len(ids))
    whole = tokenizer.decode(ids[: len(ids) - removed] + drawn)
    assert whole == text + answer["generated_text"][0]
    # what follows the end of the prompt is drawn freely
    seen, healed = ids[: len(ids) - removed], 0
    while healed < len(drawn) and len(tokenizer.decode(seen + drawn[:healed])) < len(text):
        healed += 1
    assert drawn[healed:] == fake_answer(seen + drawn[:healed], len(drawn) - healed)
    assert len(drawn) - healed in (7, 8) and answer["finish_reason"] == "length"
    assert answer["prompt_tokens"] == len(ids)


def test_other_dialects(server: RunningServer) -> None:
    body = {
        "model": "fake",
        "prompt": "go to the",
        "max_tokens": 5,
        "temperature": 0,
        "ignore_eos": True,
        "echo": True,
    }
    answer = ask(server, "/v1/completions", body)
    (choice,) = answer["choices"]
    assert choice["text"].startswith("go to the") and choice["finish_reason"] == "length"
    chat = {"model": "fake", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5, "temperature": 0}
    assert len(ask(server, "/v1/chat/completions", chat)["choices"]) == 1
