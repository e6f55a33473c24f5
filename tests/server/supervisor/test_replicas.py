"""`--dp 2` on the CPU: answers are those of one engine, also of requests whose engine dies on the way."""

from __future__ import annotations

import json
import os
import re
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from llmcore_devtools import sockets
from llmcore_devtools.family import small_model
from llmcore_devtools.server import RunningServer, serving
from llmcore_devtools.tokenizer import write_tokenizer

SETTINGS = {"device": "cpu", "data_type": "f32", "max_total_token_num": 6000, "max_req_total_len": 900}
PROMPTS = ([5, 6, 7], list(range(10, 90)), [9] * 30)
LENGTH = 700


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    small_model(
        "LlamaForCausalLM", num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=1024
    ).save_pretrained(folder)
    write_tokenizer(folder)
    return folder


def bodies() -> list[dict[str, Any]]:
    """Most ask for several answers, so one of those runs on every engine."""
    rest = {"max_tokens": LENGTH, "ignore_eos": True, "logprobs": 1, "stream": True}
    usage = {"stream_options": {"include_usage": True}}
    return [
        *({"prompt": prompt, "temperature": 0, "n": n, **rest, **usage} for n, prompt in enumerate(PROMPTS, 1)),
        {"prompt": PROMPTS[1], "top_p": 0.8, "seed": 3, "frequency_penalty": 0.3, "n": 2, **rest, **usage},
        {"prompt": PROMPTS[0], "temperature": 0.9, "seed": 7, "repetition_penalty": 1.2, "n": 2, **rest, **usage},
    ]


Choice = tuple[str, list[float]]
"""Text and log-probabilities."""


def answer(port: int, body: dict[str, Any]) -> tuple[list[Choice], dict[str, Any]]:
    """The choices of a streamed answer, and its usage."""
    with sockets.connect(port, timeout=120) as sock:
        sock.sendall(sockets.request("POST", "/v1/completions", body))
        data = sockets.read_until(sock, b"[DONE]")
    chunks = [json.loads(line) for line in re.findall(rb"data: (\{.*\})", data)]
    parts = [choice for chunk in chunks for choice in chunk["choices"]]
    choices = []
    for number in range(body["n"]):
        mine = [choice for choice in parts if choice["index"] == number]
        told = [one for choice in mine for one in (choice.get("logprobs") or {}).get("token_logprobs", ())]
        choices.append(("".join(choice["text"] for choice in mine), told))
    return choices, chunks[-1]["usage"]


def answers(port: int) -> list[tuple[list[Choice], dict[str, Any]]]:
    with ThreadPoolExecutor(8) as pool:
        return list(pool.map(lambda body: answer(port, body), bodies()))


def one_runs(server: RunningServer) -> tuple[str, int]:
    """An engine at which requests have produced tokens, and its process id."""
    while True:
        info = json.loads(sockets.call(server.admin_port, "GET", "/server_info")[2])
        for one in info["engines"]:
            if one["load"]["output_tokens"] > 20 and one["load"]["running"]:
                return one["name"], next(p["pid"] for p in info["processes"] if p["name"] == one["name"])


def same(found: list[Any], expected: list[Any]) -> None:
    for (choices, usage), (wanted, wanted_usage) in zip(found, expected, strict=True):
        assert [text for text, _ in choices] == [text for text, _ in wanted]
        for (_, logprobs), (_, wanted_logprobs) in zip(choices, wanted, strict=True):
            assert logprobs == pytest.approx(wanted_logprobs, abs=1e-3) and len(logprobs) == LENGTH
        assert usage["completion_tokens"] == wanted_usage["completion_tokens"] == LENGTH * len(choices)
        assert usage["prompt_tokens"] == wanted_usage["prompt_tokens"]


def test_answers_of_a_dead_engine_go_on_as_if_nothing_had_happened(model: Path) -> None:
    with serving(model, **SETTINGS) as server:
        alone = answers(server.port)
    with serving(model, dp=2, **SETTINGS) as server, ThreadPoolExecutor(1) as pool:
        open_ones = pool.submit(answers, server.port)
        name, pid = one_runs(server)
        os.kill(pid, signal.SIGKILL)
        same(open_ones.result(), alone)
        assert f"{name} was ended by SIGKILL" in server.log.read_text()
        assert json.loads(sockets.call(server.admin_port, "GET", "/ready")[2])["status"] == "ok"


def test_two_engines_of_two_ranks(model: Path) -> None:
    with serving(model, tp=4, dp=2, **SETTINGS) as server:
        info = json.loads(sockets.call(server.port, "GET", "/server_info")[2])
        ranks = {one["name"] for one in info["processes"] if one["name"].startswith("engine")}
        assert ranks == {"engine-0", "engine-0.1", "engine-1", "engine-1.1"}
        body = {"prompt": PROMPTS[1], "max_tokens": 20, "temperature": 0}
        texts = [json.loads(sockets.call(server.port, "POST", "/v1/completions", body)[2]) for _ in range(2)]
        assert texts[0]["choices"][0]["text"] == texts[1]["choices"][0]["text"]
